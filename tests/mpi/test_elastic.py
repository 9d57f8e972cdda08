"""hvd.elastic between real ranks: what sync gives to whom, and training that goes back and on after a failure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

import hvdlite
import hvdlite.torch as hvd
from hvdlite.errors import MismatchError, UsageError
from hvdlite.torch.elastic.handlers import SamplerStateHandler

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]


@pytest.fixture(autouse=True)
def _running() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Extra(torch.nn.Linear):
    """A layer whose state_dict holds more than tensors."""

    word = ""

    def get_extra_state(self) -> str:
        return self.word

    def set_extra_state(self, state: str) -> None:
        self.word = state


def test_sync_gives_all_ranks_what_rank_0_has() -> None:
    rank = hvd.rank()
    torch.manual_seed(rank)
    model, other = Extra(3, 2), torch.nn.BatchNorm1d(2)
    model.word = f"of {rank}"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    lbfgs = torch.optim.LBFGS(other.parameters(), lr=0.5 * (rank + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(rank + 1):  # rank 0 has taken one step
        other(model(torch.randn(4, 3))).square().sum().backward()
        optimizer.step()
        scheduler.step()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=rank + 1.0))
    state = hvd.elastic.TorchState(
        model, optimizer, other=other, lbfgs=lbfgs, wrapped=wrapped, scheduler=scheduler, epoch=10 + rank, notes=[rank]
    )
    state.epoch += 1  # what was not committed counts as well
    expected = hvd.broadcast_object((model.state_dict(), other.state_dict(), optimizer.state_dict()), 0)
    for _ in range(2):
        state.sync()
        assert (state.epoch, state.notes, model.word) == (11, [0], "of 0")
        assert (lbfgs.param_groups[0]["lr"], wrapped.param_groups[0]["lr"]) == (0.5, 1.0)
        assert scheduler.last_epoch == 1
        mine = (model.state_dict(), other.state_dict(), optimizer.state_dict())
        assert all(map(torch.equal, tensors(mine), tensors(expected)))
        assert len(tensors(mine)) == len(tensors(expected)) > 10
        # And that is what it goes back to.
        state.epoch, model.word = 99, "gone"
        torch.nn.init.zeros_(model.weight)
        state.restore()


class Pickled(Extra):
    """Its extra state is a tensor, of another size on every rank."""

    def get_extra_state(self) -> Any:
        return torch.tensor(list(self.word.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.word = bytes(state.tolist()).decode()


class Copied(torch.nn.Linear):
    """Its state_dict has copies of its parameters."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def test_sync_of_tensors_that_are_not_where_a_model_has_its_own() -> None:
    rank = hvd.rank()
    pickled, copied = Pickled(3, 2), Copied(3, 2)
    pickled.word = "word" * (rank + 1)
    for parameter in [*pickled.parameters(), *copied.parameters()]:
        torch.nn.init.constant_(parameter, rank + 1.0)
    hvd.elastic.TorchState(pickled, copied=copied).sync()
    assert pickled.word == "word"
    assert all((parameter == 1.0).all() for parameter in [*pickled.parameters(), *copied.parameters()])


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_a_sampler_with_a_handler() -> None:
    """As a program has it that registers Horovod's."""
    sampler = hvd.elastic.ElasticSampler(range(4 * hvd.size()), shuffle=False)
    handler = SamplerStateHandler(sampler)
    sampler.record_indices([hvd.rank()])
    handler.restore()
    assert sampler.processed_indices == set()
    sampler.record_indices([hvd.rank()])
    handler.save()
    assert sampler.processed_indices == {hvd.rank()}
    handler.restore()
    assert sampler.processed_indices == {*range(hvd.size())}
    sampler.set_epoch(hvd.rank() + 1)
    handler.sync()
    assert (sampler.epoch, sampler.processed_indices) == (1, set())


def test_sync_unites_what_samplers_have_processed() -> None:
    length = 4 * hvd.size() + 1
    one = hvd.elastic.ElasticSampler(range(length), seed=5)
    two = hvd.elastic.ElasticSampler(range(3))
    two.set_epoch(hvd.rank())  # only rank 0's epoch counts
    two.record_indices([hvd.rank() % 3])
    state = hvd.elastic.TorchState(one=one, two=two)
    done: set[int] = set()
    while len(one):
        one.record_batch(0, 2)
        done.update(*hvd.allgather_object(one.indices[:2]))
        state.sync()
        assert one.processed_indices == done
        left = set().union(*hvd.allgather_object(list(one)))
        assert left == set(range(length)) - done
    assert done == set(range(length))
    assert (two.epoch, two.processed_indices) == (0, {0})


def test_ranks_can_share_what_is_left_without_a_sync() -> None:
    sampler = hvd.elastic.ElasticSampler(range(2 * hvd.size()), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler, epoch=hvd.rank())
    sampler.record_batch(0, 1)
    state.on_reset()
    state.share()
    assert sampler.remaining_indices == list(range(hvd.size(), 2 * hvd.size()))
    assert state.epoch == hvd.rank()


def test_a_commit_tells_all_what_each_has_processed() -> None:
    """It would be lost with the rank."""
    size = hvd.size()
    one, two = (hvd.elastic.ElasticSampler(range(6 * size), shuffle=False) for _ in range(2))
    state = hvd.elastic.TorchState(one=one, two=two)
    one.record_batch(0, 2)
    if hvd.rank() == 0:
        two.record_indices([5])
    state.commit()
    for _ in range(2):
        assert (one.processed_indices, two.processed_indices) == (set(range(2 * size)), {5})
        one.record_batch(2, 1)
        state.check_host_updates()  # is no commit
        assert one.processed_num == 3 * size
        state.restore()
    one.record_batch(2, 1)
    state.commit()
    assert one.processed_num == 3 * size


def test_all_get_the_state_of_the_newest_commit() -> None:
    """As if a rank had died in a commit, which only the last rank has come through."""
    last = hvd.size() - 1
    sampler = hvd.elastic.ElasticSampler(range(20))
    state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), sampler=sampler, number=0)
    state.commit()
    state.number = hvd.rank()
    sampler.record_indices([hvd.rank()])
    assert state.model is not None
    torch.nn.init.constant_(state.model.weight, hvd.rank())
    if hvd.rank() == last:
        state._commits += 1
    state.sync()
    assert (state.number, state.model.weight.item(), sampler.processed_indices) == (last, last, {last})
    state.commit()
    state.sync()  # all have come as far now


def test_all_get_the_state_of_those_that_were_there_before_a_commit() -> None:
    """As if all but the last rank had come in place of others."""
    state = hvd.elastic.ObjectState(number=0)
    state.sync()
    state.number = hvd.rank()
    if hvd.rank() != hvd.size() - 1:
        state = hvd.elastic.ObjectState(number=-1)
    state.sync()
    assert state.number == hvd.size() - 1


def test_an_update_that_one_rank_heard_of_interrupts_all() -> None:
    state = hvd.elastic.ObjectState(epoch=0)
    for told in range(hvd.size()):
        state.commit()
        if hvd.rank() == told:
            state.on_hosts_updated(0.0, 1 + told % 2)
        with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is (told % 2 == 0)
    state.commit()


STEPS = 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


DATA = torch.randn(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BATCH = 2


class Crash:
    """Raises once on one rank, at a place of the third batch; the others find out by an operation that fails."""

    def __init__(self, place: str, rank: int) -> None:
        self._place = place if hvd.rank() == rank else ""

    def at(self, place: str, batch: int) -> None:
        if self._place == place and batch == 2:
            self._place = ""
            raise hvd.HorovodInternalError("a failure, as far as this rank can tell")


def train(crash: Crash, *, set_to_none: bool = True) -> tuple[dict[str, torch.Tensor], set[int], list[int], int]:
    """(weights, what was processed, sizes seen by callbacks, number of starts)."""
    torch.manual_seed(hvd.rank())
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(DATA, shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    starts = 0

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> None:
        nonlocal starts
        starts += 1
        loader = torch.utils.data.DataLoader(DATA, BATCH, sampler=state.sampler)
        for number, x in enumerate(loader):
            if state.batch == STEPS:
                return
            crash.at("begin", state.batch)
            optimizer.zero_grad(set_to_none=set_to_none)
            model(x).square().mean().backward()
            crash.at("after backward", state.batch)
            optimizer.step()
            crash.at("after step", state.batch)
            state.sampler.record_batch(number, BATCH)
            state.batch += 1
            state.commit()

    with torch.random.fork_rng():
        loop(state)
    return model.state_dict(), sampler.processed_indices, resets, starts


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["begin", "after backward", "after step"])
def test_a_failure_of_one_rank_costs_one_batch(place: str, set_to_none: bool) -> None:
    weights, _, resets, starts = train(Crash("nowhere", 0))
    assert (resets, starts) == ([], 1)
    again, processed, resets, starts = train(Crash(place, hvd.size() - 1), set_to_none=set_to_none)
    assert (resets, starts) == ([hvd.size()], 2)
    assert hvdlite.is_initialized()
    assert set().union(*hvd.allgather_object(processed)) == set(range(STEPS * BATCH * hvd.size()))
    # What was left was shared anew, but each batch of all ranks together is the same.
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [0, 2])  # 0: one bucket; with two, each is on its way before step()
@pytest.mark.parametrize("who", ["all", "first", "last"])
def test_going_back_between_backward_and_step(who: str, groups: int) -> None:
    """Ranks that step meanwhile do not wait for the gradients of those that go back."""
    model = Net().double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=groups
    )
    state = hvd.elastic.TorchState(model, optimizer)
    goes_back = hvd.rank() in {"all": range(hvd.size()), "first": [0], "last": [hvd.size() - 1]}[who]
    for step in range(6):
        saved = copy.deepcopy(model.state_dict())
        state.save()
        optimizer.zero_grad()
        model(DATA[step::6]).square().mean().backward()
        if goes_back:
            state.restore()
        else:
            optimizer.step()
        is_as_before = all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
        assert is_as_before == goes_back


def test_going_back_after_hvdlite_has_ended() -> None:
    model = Net().double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(DATA).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(DATA).square().mean().backward()
    hvd.shutdown()
    state.restore()
    hvd.init()  # as `_running` ends it


def test_the_ranks_and_the_process_sets_are_kept(comm: MPI.Intracomm) -> None:
    """Those of init(), and those that were added since; the rank that init() left out stays out."""
    if hvd.size() == 1:
        pytest.skip("nobody would be left")
    members = list(range(hvd.size() - 1))
    me = hvd.rank()
    hvd.shutdown()
    if me in members:
        first, gone = hvd.ProcessSet([0]), hvd.ProcessSet([members[-1]])
        hvd.init(comm=members, process_sets=[first] if len(members) > 1 else None)
        if len(members) > 1:
            hvd.add_process_set(gone)
            assert hvd.remove_process_set(gone)
            added = hvd.add_process_set(members[1:])
        starts = 0

        @hvd.elastic.run
        def loop(state: hvd.elastic.ObjectState) -> None:
            nonlocal starts
            starts += 1
            hvd.barrier()
            if starts < 3 and hvd.rank() == members[-1]:
                raise hvd.HorovodInternalError("a failure")
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == len(members)
            if len(members) == 1:
                return
            assert hvdlite.runtime().process_sets() == {0: members, 1: [0], 3: members[1:]}
            for process_set in (first, added):
                if process_set.included():
                    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=process_set)
                    assert total.item() == process_set.size()
            with pytest.raises(ValueError, match="is not registered"):
                gone.group()
            assert (first.process_set_id, added.process_set_id) == (1, 3)
            hvd.barrier()  # before any of them shuts down

        loop(hvd.elastic.ObjectState())
        assert starts == 3
        hvd.shutdown()
    comm.Barrier()
    hvd.init()  # for the others


def test_counts_go_on_where_ranks_start_again() -> None:
    """As hvd.init() is not called again."""
    before, after = [], []

    @hvd.elastic.run
    def loop(state: hvd.elastic.ObjectState) -> None:
        before.append(hvd.statistics())
        hvd.allreduce(torch.ones(1))
        after.append(hvd.statistics())
        if len(after) < 3:
            raise hvd.HorovodInternalError("a failure")

    loop(hvd.elastic.ObjectState())
    assert len(after) == 3
    for earlier, later in zip(after, before[1:], strict=False):
        assert all(earlier[name] <= later[name] for name in earlier)
    hvd.shutdown()
    hvd.init()
    assert hvd.statistics()["submissions"] == 0


def test_a_wrong_op_ends_it() -> None:
    """Which would come again and again, though programs written for Horovod catch HorovodInternalError for it."""
    starts = 0

    @hvd.elastic.run
    def loop(state: hvd.elastic.ObjectState) -> None:
        nonlocal starts
        starts += 1
        hvd.reducescatter(torch.ones(4), op=hvd.Max)

    with pytest.raises(UsageError, match="op is Max; pass hvd.Average or hvd.Sum"):
        loop(hvd.elastic.ObjectState())
    assert starts == 1
    hvd.barrier()


def test_ranks_that_contradict_one_another_are_told() -> None:
    if hvd.size() == 1:
        pytest.skip("ranks cannot contradict one another where there is one")

    @hvd.elastic.run
    def loop(state: hvd.elastic.ObjectState) -> None:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="odd")

    with pytest.raises(MismatchError, match="'odd': shape"):
        loop(hvd.elastic.ObjectState())
    hvd.barrier()


def test_a_commit_is_a_copy() -> None:
    """A commit is a copy: later steps do not change it."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = hvd.elastic.TorchState(model, optimizer)
    contents = []
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.commit()
        contents.append(copy.deepcopy(optimizer.state_dict()))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.restore()
        assert all(map(torch.equal, tensors(optimizer.state_dict()), tensors(contents[-1])))
