"""Settings: names, precedence, and errors that name the variable."""

import pytest

from hvdlite.config import Config
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
    ("HVDLITE_START_TIMEOUT", "0"),
    ("HVDLITE_LOG_LEVEL", "loud"),
])  # fmt: skip
def test_an_error_names_variable_and_value(name, text):
    with pytest.raises(ConfigError, match=f"{name}='{text}'") as caught:
        Config.from_env({name: text})
    assert isinstance(caught.value, StartupError)
    assert isinstance(caught.value, ValueError)


def test_autotuning_is_set_by_horovods_names_too():
    config = Config.from_env({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20"})
    assert (config.autotune, config.autotune_max_samples) == (True, 20)
    both = {"HVDLITE_AUTOTUNE_MAX_SAMPLES": "10", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20"}
    assert Config.from_env(both).autotune_max_samples == 10


def test_interfaces_fall_back_to_those_of_nccl_and_gloo():
    assert Config.from_env({"GLOO_SOCKET_IFNAME": "eth1"}).network_interfaces == "eth1"
    assert Config.from_env({"GLOO_SOCKET_IFNAME": "a", "NCCL_SOCKET_IFNAME": "b"}).network_interfaces == "b"
    assert Config.from_env({"NCCL_SOCKET_IFNAME": "b", "HOROVOD_NETWORK_INTERFACES": "c"}).network_interfaces == "c"


def test_horovods_word_for_a_timeline_that_starts_later():
    assert Config.from_env({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""
    assert Config.from_env({"HOROVOD_TIMELINE": "dynamic.json"}).timeline == "dynamic.json"
