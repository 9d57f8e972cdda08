"""Settings: names, precedence, errors that name the variable; all of them in one list, read in one place."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from hvdlite import environment
from hvdlite.config import OTHER_VARIABLES, START, Config, answers, misspelt_settings
from hvdlite.errors import ConfigError, StartupError


def test_defaults_without_environment():
    assert Config.from_env({}) == Config()


def test_hvdlite_goes_before_horovod():
    both = {"HVDLITE_FUSION_THRESHOLD": "1", "HOROVOD_FUSION_THRESHOLD": "2"}
    assert Config.from_env(both).fusion_threshold_bytes == 1
    assert Config.from_env({"HOROVOD_FUSION_THRESHOLD": "2"}).fusion_threshold_bytes == 2


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("Yes", True), ("0", False), ("off", False)])
def test_booleans_mean_what_people_write(text, value):
    assert Config.from_env({"HOROVOD_STALL_CHECK_DISABLE": text}).stall_check_disable is value


@pytest.mark.parametrize(("name", "text"), [
    ("HOROVOD_STALL_CHECK_DISABLE", "maybe"),
    ("HVDLITE_FUSION_THRESHOLD", "-1"),
    ("HVDLITE_FUSION_THRESHOLD", "64MB"),
    ("HVDLITE_FUSION_THRESHOLD", "99999999999999999999"),
    ("HVDLITE_CACHE_CAPACITY", "9223372036854775807"),
    ("HVDLITE_TIMELINE_EVENTS", "1000000000001"),
    ("HVDLITE_SPIN_MICROSECONDS", "1000000000"),
    ("HVDLITE_METRICS_PORT", "65536"),
    ("HVDLITE_START_TIMEOUT", "0"),
    ("HVDLITE_START_TIMEOUT", "inf"),
    ("HVDLITE_START_TIMEOUT", "1e300"),
    ("HVDLITE_COLLECTIVE_TIMEOUT_SECONDS", "infinity"),
    ("HVDLITE_CYCLE_TIME", "nan"),
    ("HVDLITE_IDLE_SECONDS", "nan"),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "-inf"),
    ("HVDLITE_LOG_LEVEL", "loud"),
])  # fmt: skip
def test_an_error_names_variable_and_value(name, text):
    with pytest.raises(ConfigError, match=f"{name}='{text}'") as caught:
        Config.from_env({name: text})
    assert isinstance(caught.value, StartupError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "a whole number"),
        ("HOROVOD_CACHE_CAPACITY", "1.5", "a whole number"),
        ("HOROVOD_CYCLE_TIME", "5 ms", "a number"),
    ],
)
def test_an_error_says_what_is_no_number(name: str, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{text}': must be {what}$"):
        Config.from_env({name: text})


@pytest.mark.parametrize(
    ("settings", "patience_s"),
    [
        ({}, 6.0),
        ({"stall_check_time_s": 2.0}, 1.0),
        ({"stall_check_time_s": 0.0}, math.inf),
        ({"stall_check_time_s": 0.0, "stall_shutdown_time_s": 300.0}, 30.0),
        ({"stall_shutdown_time_s": 40.0}, 4.0),
        ({"stall_check_disable": True}, math.inf),
    ],
)
def test_the_root_hears_of_who_waits_long_before_a_stall_is_reported(settings, patience_s):
    assert Config(**settings).stall_patience_s == patience_s


def test_autotuning_is_set_by_horovods_names_too():
    config = Config.from_env({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20"})
    assert (config.autotune, config.autotune_max_samples) == (True, 20)
    both = {"HVDLITE_AUTOTUNE_MAX_SAMPLES": "10", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20"}
    assert Config.from_env(both).autotune_max_samples == 10


def test_interfaces_fall_back_to_those_of_nccl_and_gloo():
    assert Config.from_env({"GLOO_SOCKET_IFNAME": "eth1"}).network_interfaces == "eth1"
    assert Config.from_env({"GLOO_SOCKET_IFNAME": "a", "NCCL_SOCKET_IFNAME": "b"}).network_interfaces == "b"
    assert Config.from_env({"NCCL_SOCKET_IFNAME": "b", "HOROVOD_NETWORK_INTERFACES": "c"}).network_interfaces == "c"


def test_variables_of_transformer_engine_are_honoured_or_answered():
    assert Config.from_env({"UB_TIMEOUT": "7"}).ub_timeout_s == 7
    assert Config.from_env({"UB_TIMEOUT": "7", "HVDLITE_UB_TIMEOUT_SECONDS": "8"}).ub_timeout_s == 8
    assert Config.from_env({"UB_SKIPMC": "1"}).ub_skip_multicast
    assert not Config.from_env({"UB_SKIPMC": "0"}).ub_skip_multicast
    assert answers({"UB_SKIPMC": "1", "UB_TIMEOUT": "7", "NVTE_UB_SOCKET_IFNAME": ""}) == []
    (interfaces,) = answers({"NVTE_UB_SOCKET_IFNAME": "eth0"})
    assert "HVDLITE_NETWORK_INTERFACES" in interfaces


def test_horovods_word_for_a_timeline_that_starts_later():
    assert Config.from_env({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""
    assert Config.from_env({"HOROVOD_TIMELINE": "dynamic.json"}).timeline == "dynamic.json"


def test_a_coordinator_may_sleep_without_end():
    assert Config.from_env({"HVDLITE_IDLE_SECONDS": "inf"}).idle_s == math.inf


ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*ROOT.glob("hvdlite/**/*.py"), *ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.c*")]


def test_a_name_that_is_nearly_a_setting_s_is_named():
    environ = dict.fromkeys(
        ["HVDLITE_TIMELINE", "HVDLITE_MY_OWN", "HVDLITE_INSTRUCTION_SET", START, "FUSION_TRESHOLD"], ""
    )
    assert misspelt_settings(environ) == []
    assert misspelt_settings({**environ, "HVDLITE_FUSION_TRESHOLD": "1"}) == [
        "HVDLITE_FUSION_TRESHOLD is no setting, and is ignored: is HVDLITE_FUSION_THRESHOLD meant?"
    ]
    one, several = misspelt_settings({"HVDLITE_START_TIMEOUT_SECONDS": "1", "HVDLITE_FULL_TRACEBACK": "1"})
    assert one.startswith("HVDLITE_FULL_TRACEBACK is no") and one.endswith("is HVDLITE_FULL_TRACEBACKS meant?")
    assert "is HVDLITE_HEARTBEAT_TIMEOUT_SECONDS or " in several and "or HVDLITE_START_TIMEOUT meant?" in several


def test_one_module_touches_the_environment():
    touches = re.compile(r"\b(os\.(environb?|getenvb?|putenv|unsetenv)|(secure_)?getenv|setenv)\b")
    found = {str(path.relative_to(ROOT)) for path in SOURCES if touches.search(path.read_text())}
    assert found == {"hvdlite/environment.py"}


def test_every_variable_is_listed_with_its_meaning():
    settings = {f"HVDLITE_{name}" for item in fields(Config) for name in item.metadata["names"]}
    sources = [*ROOT.glob("hvdlite/**/*.py"), *ROOT.glob("tools/*.py"), ROOT / "setup.py"]
    named = {name for path in sources for name in re.findall(r"\bHVDLITE_[A-Z_]*[A-Z]\b", path.read_text())}
    assert named - {"HVDLITE_X"} <= settings | OTHER_VARIABLES.keys()
    source = (ROOT / "hvdlite" / "config.py").read_text()
    for item in fields(Config):
        assert re.search(rf'^    {item.name}: .*\n    """\S', source, re.MULTILINE), item.name


def test_where_a_cache_is(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert environment.cache_directory() == "/caches/hvdlite"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert environment.cache_directory() == "/home/me/.cache/hvdlite"
    monkeypatch.delenv("HOME")
    assert environment.cache_directory() == ""
