"""torch's own tests of backends over hvdlite: some of them always, all of them with --thorough."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

import table

if find_spec("expecttest") is None:
    pytest.skip("expecttest is not installed: pip install 'hvdlite[test]'", allow_module_level=True)

# One of each kind, and quick; all pass.
SOME = (
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_object_list",
    "test_ddp_grad_div_uneven_inputs",
    "test_destroy_full_group",
    "test_gather",
    "test_get_future",
    "test_isend",
    "test_monitored_barrier_allreduce_hang",
    "test_reduce_max",
    "test_scatter",
    "test_send_recv_any_source",
    "test_sync_bn_logged",
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_some_pass(ranks: int) -> None:
    found = table.run("hvdlite", ranks, SOME, limit_s=180)
    assert {case: each.reason for case, each in found.items() if each.outcome != "passed"} == {}
    assert {*found} == {*SOME}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", table.RANKS)
def test_all_pass_that_the_table_does_not_name(ranks: int) -> None:
    try:
        expected = table.read()[str(ranks)]
    except ValueError as error:
        pytest.skip(str(error))
    found = table.run("hvdlite", ranks)
    not_passed = {case: each.outcome for case, each in found.items() if each.outcome != "passed"}
    assert not_passed == {case: each.outcome for case, each in expected.items()}


def test_the_table_explains_what_gloo_does_better() -> None:
    outcomes = json.loads(table.OUTCOMES.read_text())
    assert table.lost(outcomes) == {*table.EXPLAINED}
    assert table.PAGE.read_text() == table.page(outcomes)
