"""torch's own tests of backends over hvdlite: some of them always, all of them with --thorough."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import table

if find_spec("expecttest") is None:
    pytest.skip("expecttest is not installed: pip install 'hvdlite[test]'", allow_module_level=True)

# One of each kind. Three ranks find what two hide, and torch's groups of ranks 1 and 2 are parts of them.
SOME = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_group",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_group_sum",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_monitored_barrier_wait_all_ranks",
    "test_reduce_full_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
)


def test_some_pass() -> None:
    found = table.run("hvdlite", 3, SOME, limit_s=180)
    assert {case: each.reason for case, each in found.items() if each.outcome != "passed"} == {}
    assert {*found} == {*SOME}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", table.RANKS)
def test_all_pass_that_the_table_does_not_name(ranks: int) -> None:
    expected = table.Table.read()
    if expected.torch != table.torch_release():
        pytest.skip(f"the table is of torch {expected.torch}")
    found = table.run("hvdlite", ranks)
    not_passed = {case: each.outcome for case, each in found.items() if each.outcome != "passed"}
    assert not_passed == {case: each.outcome for case, each in expected.not_passed[str(ranks)]["hvdlite"].items()}


def test_the_page_explains_what_gloo_does_better() -> None:
    outcomes = table.Table.read()
    assert outcomes.lost() == {*table.EXPLAINED}
    assert table.PAGE.read_text() == table.page(outcomes)
