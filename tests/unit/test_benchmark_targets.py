"""What `python -m benchmarks` makes of its reports: each target of benchmarks/targets.py, and the page's table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from beside_compute import Row, compare, report, rounds_within
from figures import Target, lines
from measure import estimate, in_turns, median_ratio
from pages import allreduce_table, collectives_table, operations_table, refresh, split_table, steps_table, targets_table
from targets import targets

KIB, MIB = 1 << 10, 1 << 20


def exactly(value: float) -> dict[str, float]:
    return {"value": value, "low": value, "high": value}


def allreduce(sizes: list[int], own: dict[str, float], others: dict[str, float], **more: Any) -> dict[str, Any]:
    """A report in which each way takes so many microseconds per MiB."""
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        for way, time in {**own, **others}.items():
            row: dict[str, Any] = {"way": way, "bytes": nbytes, "median_us": time * nbytes / MIB}
            if way in own:
                row["times_as_fast"] = {other: exactly(others[other] / time) for other in others}
            rows.append(row | more)
    return {"rows": rows}


def found(reports: dict[str, Any], what: str) -> dict[str, tuple[float, bool]]:
    """Of the target that begins like ``what``: its figures, and whether each is met."""
    (target,) = (each for each in targets(reports) if each.what.startswith(what))
    return {each.label: (pytest.approx(each.value), each.is_met) for each in target.figures}


OWN = {"hvdlite backend": 2.0, "hvd, in its slot": 2.5, "hvd, elsewhere": 6.0}
OPEN_MPI = allreduce(
    [4 * MIB, 16 * MIB, 64 * MIB],
    OWN,
    {"memcpy": 2.0, "MPI": 8.0, "MPI coll/sm": 7.0, "MPI, pieces": 5.0, "Gloo": 12.0},
)
MPICH = allreduce([16 * MIB], OWN, {"memcpy": 2.0, "MPI": 5.5})


def test_allreduce_against_memcpy() -> None:
    reports = {"allreduce": OPEN_MPI}
    assert found(reports, "allreduce of 64 MiB in its slot") == {"time / memcpy's": (1.25, False)}
    assert found(reports, "the same from elsewhere") == {"time / memcpy's": (3.0, True)}


def test_allreduce_against_the_fastest_mpi() -> None:
    reports = {"allreduce": OPEN_MPI, "allreduce_mpich": MPICH}
    assert found(reports, "node backend, times as fast as MPI") == {
        "one call, Open MPI, least at 4 MiB": (3.5, True),
        "one call, MPICH, least at 16 MiB": (2.75, False),
        "or in 4 MiB pieces, Open MPI, least at 4 MiB": (2.5, True),  # nothing is wanted of it
        "or in 4 MiB pieces, MPICH, least at 16 MiB": (2.75, True),
    }
    figures = found(reports, "hvd.allreduce_, times as fast as MPI")
    assert figures["hvd, in its slot, from 16 MiB, MPICH, least at 16 MiB"] == (5.5 / 2.5, False)
    assert figures["hvd, in its slot, from 256 KiB, Open MPI, least at 4 MiB"] == (2.0, True)
    assert figures["hvd, in its slot, from 64 MiB, Open MPI, least at 64 MiB"] == (2.0, True)  # nothing is wanted of it
    assert figures["hvd, elsewhere, from 1 MiB, MPICH, least at 16 MiB"] == (5.5 / 6, False)


def test_calls_of_users_against_intel_mpi() -> None:
    report = allreduce([4, 4 * KIB], OWN, {"memcpy": 0.1, "MPI": 1.5})
    report["rows"] += allreduce([MIB], OWN, {"MPI": 3.0})["rows"]
    assert found({"allreduce_intelmpi": report}, "hvd.allreduce_ in its slot, times as fast as Intel MPI") == {
        "below 4 KiB, least at 4 B": (0.6, True),
        "from 4 KiB, least at 4 KiB": (0.6, False),
    }


def test_allreduce_against_gloo_is_least_where_it_is_least() -> None:
    report = allreduce([MIB], OWN, {"Gloo": 20.0})
    report["rows"] += allreduce([4 * MIB], OWN, {"Gloo": 10.0})["rows"]
    report["rows"] += allreduce([1 << 17], OWN, {"Gloo": 1.0})["rows"]  # too small to count
    assert found({"allreduce": report}, "hvd.allreduce_, times as fast as Gloo") == {
        "hvd, in its slot, least at 4 MiB": (4.0, False),
        "hvd, elsewhere, least at 4 MiB": (10 / 6, False),
    }


def test_slots() -> None:
    ways = {"float32, 2 ranks": 1.0, "float16, 2 ranks": 1.25, "bfloat16, 2 ranks": 1.3, "float32, 4 ranks": 2.4}
    report = {"ranks": 4, "few": 2, "ways": {label: {"time_of_first": exactly(time)} for label, time in ways.items()}}
    assert found({"slot": report}, "16-bit") == {"float16": (0.8, True), "bfloat16": (1 / 1.3, False)}
    assert found({"slot": report}, "more ranks than cores") == {"time of 4 ranks / of 2": (2.4, True)}


def test_small_operations() -> None:
    report = {
        "blocking, 4 B": {
            "hvd.allreduce": {"median_us": 14, "p99_us": 400},
            "hvd.allreduce_": {"median_us": 11, "p99_us": 100},
        },
        "10 at once, 4 KiB": {"hvd.allreduce_async_": {"median_us": 45.0, "times_as_fast": {"Gloo": exactly(6.0)}}},
        "two orders": {"one_us": 2.0, "in_turns_us": 2.1, "relative": exactly(1.05)},
    }
    assert found({"latency": report}, "one blocking") == {
        "hvd.allreduce, median, us": (14, True),
        "hvd.allreduce, 99th percentile, us": (400, False),
        "hvd.allreduce_, median, us": (11, False),
        "hvd.allreduce_, 99th percentile, us": (100, True),
    }
    assert found({"latency": report}, "many small") == {
        "10 at once, 4 KiB, each, us": (4.5, False),
        "10 at once, 4 KiB, times as fast as Gloo": (6.0, True),
    }
    assert found({"latency": report}, "two orders") == {"2.10 us per operation, time / of one order": (1.05, True)}


def test_small_operations_of_more_ranks_than_cores() -> None:
    report = allreduce([4, 4 * KIB, 64 * KIB], OWN, {"MPI": 1.5})
    assert found({"allreduce_8": report}, "small ones of more ranks") == {"8 ranks, 4 KiB, time / MPI's": (4.0, False)}


def model(name: str, own: float, mpi: float, step: float, exposed: float, ddp_ms: float = 9.0) -> dict[str, Any]:
    """Steps relative to those without communication, and hvdlite's to MPI's; what is exposed, to DDP's."""
    return {
        "model": name,
        "ways": {
            "hvdlite": {"relative": exactly(own), "exposed_ms": exactly(2.0)},
            "DDP": {"exposed_ms": {"value": ddp_ms, "low": ddp_ms - 5, "high": ddp_ms + 5}},
            "MPI": {"relative": exactly(mpi)},
        },
        "against_best": {
            "DDP": {"way": "DDP", "exposed": exactly(exposed)},
            "simple MPI": {"way": "MPI", "step": exactly(step), "exposed": exactly(0.45)},
        },
    }


def torch_report(**faster: float) -> dict[str, Any]:
    """Of torch.distributed: how many times as fast as Gloo each collective is, at 4 B and at 1 MiB."""
    collectives = [
        {"collective": name, "bytes": nbytes, "times_as_fast": exactly(times * (2 if nbytes == 4 else 1))}
        for name, times in faster.items()
        for nbytes in (4, MIB)
    ]
    ways = {"hvdlite": {"median_ms": 4.0}, "Gloo": {"median_ms": 8.0}}
    step = {"model": "transformer", "ways": ways, "step": exactly(0.5)}
    return {"collectives": collectives, "ddp": [step | {"exposed": exactly(0.25)}], "fsdp2": [step]}


def test_torch_distributed_against_gloo() -> None:
    reports = {
        "torch_distributed": torch_report(reduce=6.0, gather=4.0),
        "torch_distributed_4": torch_report(reduce=2.0),
    }
    assert found(reports, "torch.distributed: collectives") == {
        "2 ranks, least of gather at 1 MiB": (4.0, False),
        "4 ranks, least of reduce at 1 MiB": (2.0, False),
    }
    assert found(reports, "torch.distributed: time of 4 B") == {
        "2 ranks, most of gather": (1 / 8, True),
        "4 ranks, most of reduce": (1 / 4, False),
    }
    assert found(reports, "torch.distributed: exposed")["4 ranks, transformer"] == (0.25, True)
    assert found(reports, "torch.distributed: step of FSDP2")["2 ranks, transformer"] == (0.5, True)


def test_the_table_of_collectives() -> None:
    report = torch_report(reduce=6.0)
    report["collectives"][1]["bound"] = exactly(8.0)
    rows = collectives_table(report).splitlines()
    assert rows[0] == "| times as fast as Gloo | 4 B | 1 MiB |" and rows[2] == "| reduce | 12.0 | 6.0 (8.0) |"
    assert rows[-2:] == ["| DDP: transformer | 4 | 8 | 0.25 (0.25 to 0.25) |", "| FSDP2: transformer | 4 | 8 |  |"]


def test_steps() -> None:
    models = [
        model("small GPT", 1.01, 1.01, 1.0, 0.5),
        model("ResNet-50", 1.02, 1.01, 1.0, 0.5),
        model("400 tiny parameters", 1.05, 1.2, 1.1, 0.6),
        model("convolutional", 1.02, 1.03, 0.9, -70.0, ddp_ms=4.0),
    ]
    reports = {"train_step": {"models": models}, "one_rank": {"models": models}}
    assert found(reports, "step time, against DDP") == {
        "small GPT, exposed / DDP's": (0.5, True),
        "ResNet-50, exposed / DDP's": (0.5, True),
        "400 tiny parameters, exposed / DDP's": (0.6, False),
        "convolutional, where what DDP exposes is within the noise, exposed ms": (2.0, True),
        "small GPT, where MPI costs 1.0 %": (1.0, True),
        "ResNet-50, where MPI costs 1.0 %": (1.0, True),
        "400 tiny parameters, step / that of MPI": (1.1, False),
        "convolutional, step / that of MPI": (0.9, True),
    }
    assert found(reports, "400 tiny parameters") == {"that of MPI": (0.45, True), "that of DDP": (0.6, False)}
    assert found(reports, "step of compute-bound") == {
        "small GPT": (1.01, True),
        "ResNet-50": (1.02, False),
        "convolutional": (1.02, True),  # nothing is wanted of it
    }
    assert found(reports, "step with 1 rank") == {
        "small GPT": (1.01, True),
        "ResNet-50": (1.02, False),
        "400 tiny parameters": (1.05, True),
        "convolutional": (1.02, False),
    }


def test_costs() -> None:
    waiting = [{"shares": [0.0005, 0.001]}, {"shares": [0.004, 0.0005]}]
    memory = {
        "big": {"gradient_bytes": 320 * MIB, "at_rest_bytes": 4 * MIB, "at_peak_bytes": 40 * MIB},
        "small": {"gradient_bytes": 0, "at_rest_bytes": 4 * MIB, "at_peak_bytes": 8 * MIB},
    }
    reports = {
        "costs": {"idle": [0.0001, 0.0002], "waiting": waiting, "memory": memory},
        "costs_hosts": {"idle": [0.01], "waiting": waiting[:1]},
    }
    assert found(reports, "processor time of an idle") == {"one node, %": (0.02, True), "two hosts, %": (1.0, False)}
    assert found(reports, "processor time while") == {"one node, %": (0.4, False), "two hosts, %": (0.1, True)}
    assert found(reports, "memory") == {
        "between steps, 4.0 MiB for small: of what is allowed": (4 / 16, True),
        "during a step, 40.0 MiB for big: of what is allowed": (40 / 32, False),
    }


def test_hosts() -> None:
    own = {"hvd, in its slot": 10.0, "hvdlite backend": 9.0}
    report = allreduce([64 * MIB], own, {"TCP": 8.0, "MPI": 14.0}, of_bound=exactly(1.09))
    assert found({"hosts_2x2": report | {"ranks": 4, "nodes": 2}}, "2 hosts x 2 ranks") == {
        "hvd, in its slot, time / bound": (1.09, False),
        "hvdlite backend, time / bound": (1.09, True),
        "TCP, time / bound": (1.09, True),
        "times as fast as MPI": (1.4, False),  # a flat ring sends 1.5 times as much
    }
    alone = found({"hosts_4x1": report | {"ranks": 4, "nodes": 4}}, "4 hosts x 1 rank")
    assert alone["hvd, in its slot, time / bound"] == (1.09, True)
    assert "times as fast as MPI" not in alone
    small = allreduce([4, 64], own, {"MPI": 4.5})
    assert found({"hosts_small": small}, "4 hosts, 4 B") == {
        "hvd, in its slot, time / MPI's, most at 4 B": (20 / 9, False),
        "hvdlite backend, time / MPI's, most at 4 B": (2.0, True),
    }


def test_hidden_share_and_timeline() -> None:
    assert found({"overlap": {"hidden_share": exactly(0.8)}}, "2 hosts, 1 Gbit/s: comm") == {
        "hidden share": (0.8, False)
    }
    shares = {"hidden_share": exactly(0.8), "tcp": None, "asleep": {"hidden_share": exactly(0.9)}}
    assert found({"overlap": shares}, "2 hosts, 1 Gbit/s: comm") == {
        "hidden share": (0.8, False),
        "hidden behind a backward that sleeps": (0.9, True),
    }
    assert found({"overlap": {"hidden_share": None}}, "2 hosts, 1 Gbit/s: comm") == {}
    reports = {"timeline_cost": {"models": {"transformer": {"relative": exactly(1.02)}}}}
    assert found(reports, "step with the timeline") == {"transformer": (1.02, True)}


def test_recovery_and_examination() -> None:
    seconds = {"one node, Open MPI": [0.1, 5.1, 0.2], "a host lost, Open MPI": [14.0]}
    anew = {"begins anew, MPICH": [31.0], "a host lost, MPICH": [23.0]}
    reports = {"recovery": {"seconds": seconds}, "recovery_mpich": {"seconds": anew}}
    assert found(reports, "elastic: from a death") == {
        "one node, Open MPI, s": (5.1, False),
        "a host lost, Open MPI, s": (14.0, True),
        "begins anew, MPICH, s": (31.0, False),
        "a host lost, MPICH, s": (23.0, True),
    }
    examined = {"links_examined": {"doctor_s": [9.0, 10.5], "probe_s": [0.1]}}
    assert found(examined, "network of 4 hosts") == {
        "hvdliterun --doctor, s": (10.5, False),
        "in hvd.init(), s": (0.1, True),
    }


def split_rows(own_ms: float, limit: float, **case: Any) -> list[Row]:
    """Of compute that takes 100 ms, where hvdlite takes ``own_ms``, its operations 110 and Gloo 150."""
    times = {"compute alone": 100.0, "hvdlite, chosen": own_ms, "hvdlite, unfused": 110.0, "Gloo": 150.0}
    seconds = {way: np.full(5, ms * 1e-3) for way, ms in times.items()}
    return compare(seconds, "compute alone", "hvdlite, chosen", {"hvdlite, unfused", "MPI", "Gloo"}, limit, case)


GATHER = [
    row
    for rows, own_ms in ((512, 106.0), (2048, 101.0))
    for row in split_rows(own_ms, 1.02, what="all-gather, matmul", dtype="bfloat16", rows=rows, hidden=1024)
]
FORWARD = split_rows(115.5, 1.08, direction="forward", dtype="float32", form="rows", rows=512, hidden=1024)
LAYER = [*FORWARD, *split_rows(105.0, 1.08, direction="both", dtype="float32", form="rows", rows=512, hidden=1024)]


def test_tensor_parallelism() -> None:
    reports = {"tensor_parallel": {"rows": GATHER}, "tensor_parallel_layer": {"rows": LAYER}}
    assert found(reports, "tensor parallelism: all-gather") == {"bfloat16, most at 512 rows of 1024": (1.06, False)}
    assert found(reports, "tensor parallelism: matmul") == {}
    assert found(reports, "tensor parallelism: forward") == {"float32, rows, most at 512 rows of 1024": (1.155, False)}
    assert found(reports, "tensor parallelism: backward") == {}
    where = "most at {}, 512 rows of 1024"
    assert found(reports, "tensor parallelism, against") == {
        f"all-gather, matmul, time / hvdlite, unfused, {where.format('bfloat16')}": (106 / 110, True),
        f"forward of a layer, time / hvdlite, unfused, {where.format('float32')}": (1.05, False),
    }
    assert split_table({"rows": GATHER}).splitlines()[2:] == [
        "| all-gather, matmul, bfloat16, 512 rows of 1024 | ≤ 1.02 | **1.060** | 1.100 | 1.500 |",
        "| all-gather, matmul, bfloat16, 2048 rows of 1024 | ≤ 1.02 | 1.010 | 1.100 | 1.500 |",
    ]
    forward = split_table({"rows": LAYER}).splitlines()[2]
    assert forward.startswith("| forward, float32, 512 rows of 1024, sequence parallel | ≤ 1.08 | **1.155** | 1.100 |")


def test_what_misses_is_said() -> None:
    told = report(LAYER, ("direction", "rows")).split("Missed:\n")[1].splitlines()
    assert told == [
        "  forward, 512: 1.155 (1.155, 1.155) times compute alone, wanted <= 1.08",
        "  forward, 512: 1.050 (1.050, 1.050) times hvdlite, unfused, wanted <= 1",
    ]
    assert report(GATHER[4:], ("what", "rows")).endswith("No target is missed.")
    seconds = {"alone": np.full(4, 1.0), "own": np.array([1.0, 1.3, 1.3, 1.0]), "unfused": np.full(4, 2.0)}
    doubtful = compare(seconds, "alone", "own", {"unfused"}, 1.1, {"what": "a sum"})
    assert report(doubtful, ("what",)).endswith("times alone, wanted <= 1.1, within its interval")


def test_as_many_rounds_as_there_is_time_for() -> None:
    assert [rounds_within(15.0, 10, seconds) for seconds in (1.0, 3.0, 100.0)] == [10, 5, 3]
    assert rounds_within(15.0, 1, 100.0) == 1


def test_gpus() -> None:
    pack = {"pack": {"ways": {"copy": {}, "pack": {"of_copy": exactly(0.86)}, "unpack": {"of_copy": exactly(0.84)}}}}
    steps = [{"model": "small GPT", "relative": exactly(1.02)}, {"model": "transformer", "relative": exactly(1.5)}]
    reports: dict[str, Any] = {"gpu": pack | {"step": steps}}
    assert found(reports, "GPU: bandwidth") == {"pack": (0.86, True), "unpack": (0.84, False)}
    assert found(reports, "GPU: step") == {"small GPT": (1.02, False), "transformer": (1.5, True)}
    ways = {"copy": 1.0, "hvdlite backend": 1.31, "hvd, elsewhere": 2.0}
    rows = [{"way": way, "bytes": n * MIB, "of_first": exactly(x)} for n in (16, 64) for way, x in ways.items()]
    assert found({"gpu_node_4": {"node": rows}}, "GPU: allreduce") == {
        "4 ranks, 64 MiB, hvdlite backend": (1.31, False),
        "4 ranks, 64 MiB, hvd, elsewhere": (2.0, True),
    }
    assert found({"gpu_hidden": {"hidden": {"hidden_share": exactly(0.9)}}}, "GPU: comm") == {
        "hidden share": (0.9, True)
    }
    assert found({"gpu_hidden": {"hidden": {"hidden_share": None}}}, "GPU: comm") == {}
    rows = [{"way": way, "bytes": MIB, "of_first": exactly(1.2)} for way in ("ProcessGroupNCCL", "hvdlite")]
    assert found({"gpu_nccl": {"nccl": rows}}, "GPUs: allreduce") == {"1 MiB, time / NCCL's": (1.2, True)}


def test_tables_have_a_row_for_every_target() -> None:
    nothing = targets({})
    assert len(nothing) == 41
    assert [row[0] for row in lines(nothing)] == [target.what for target in nothing]
    assert {target.verdict for target in nothing} == {"not measured"}
    some: list[Target] = targets({"allreduce": OPEN_MPI})
    table = targets_table(some).splitlines()
    assert len(table) == 2 + len(nothing)
    assert table[2].endswith("| ≤ 1.1 | time / memcpy's: **1.25 (1.25, 1.25)** | NO |")
    assert table[3].endswith("| ≤ 3 | time / memcpy's: 3 (3, 3) | yes |")


def test_tables_of_the_page() -> None:
    rows = [
        {"way": "memcpy", "bytes": 4 * MIB, "median_us": 310.4},
        {"way": "Gloo", "bytes": 4 * MIB, "median_us": 1e6},
    ]
    table = allreduce_table({"rows": rows}).splitlines()
    first = [row.split(" | ")[0] for row in table[2:]]
    assert first == ["| 16 KiB", "| 256 KiB", "| 4 MiB", "| 16 MiB", "| 64 MiB", "| 256 MiB"]
    assert table[1].count("---") == 9
    assert table[4] == "| 4 MiB | 0.31 |  |  |  |  |  |  | 1000 |"
    ways = {
        "no communication": {"median_ms": 59.85},
        "DDP": {"relative": {"value": 1.4563, "low": 1.37, "high": 1.486}},
    }
    model = {"model": "transformer", "gradient_bytes": 14 * MIB, "ways": ways}
    *_, row = steps_table({"models": [model]}).splitlines()
    assert row == "| transformer, 14 MiB | 60 ms |  | 1.456 (1.37, 1.49) |  |  |  |  |"


def test_operations_beside_mpi() -> None:
    def row(operation: str, nbytes: int, ours: float, mpi: float) -> dict[str, object]:
        ways = {"hvd": {"median_us": ours}, "MPI": {"median_us": mpi}, "Gloo": {"median_us": 1.0}}
        return {"operation": operation, "bytes": nbytes, "ways": ways}

    operations = [row("broadcast_", 4, 61.8, 1.52), row("broadcast_", 4096, 55.4, 5.0), row("alltoall", 4, 90.0, 3.3)]
    operations += [row("alltoall", 4096, 82.9, 3.8)]
    steps = {"nothing": {"median_us": 34.4}, "allgather": {"median_us": 153.0}}
    assert operations_table({"operations": operations, "steps": steps}).splitlines() == [
        "| us | 4 B | 4 KiB |",
        "|---|---|---|",
        "| `hvd.broadcast_` | 62 (1.5) | 55 (5) |",
        "| `hvd.alltoall` | 90 (3.3) | 83 (3.8) |",
        "",
        "| 20 allreduces of 256 B, and | nothing | allgather |",
        "|---|---|---|",
        "| us | 34 | 153 |",
    ]


def test_a_page_is_refreshed_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- /a -->\nafter\n")
    refresh(page, "a", "| new |")
    assert page.read_text() == "before\n<!-- a -->\n| new |\n<!-- /a -->\nafter\n"
    with pytest.raises(ValueError, match="unpack"):
        refresh(page, "b", "| new |")


def test_an_estimate_is_of_pairs() -> None:
    """What doubles all times of a round leaves ratios alone."""
    disturbed = np.repeat([1.0, 2.0], 10)
    assert estimate(median_ratio, 3 * disturbed, 2 * disturbed) == exactly(1.5)
    ratios = estimate(median_ratio, np.arange(1.0, 101), np.ones(100))
    assert ratios["value"] == 50.5
    assert 30 < ratios["low"] < 50.5 < ratios["high"] < 70


def test_turns() -> None:
    order = list(in_turns("abcd", 50))
    rounds = ["".join(order[i : i + 4]) for i in range(0, 200, 4)]
    assert all(sorted(turn) == list("abcd") for turn in rounds)
    assert len(set(rounds)) > 10
    assert order == list(in_turns("abcd", 50))  # all ranks have the same
