"""hvd.elastic without other processes: what states keep, when `run` starts over."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from fake_world import Universe
from hvdlite import default_runtime
from hvdlite.config import Config
from hvdlite.errors import (
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    RankFailedError,
    StallError,
    UnrecoverableError,
    UsageError,
)
from hvdlite.recorder import Recorder
from hvdlite.torch import startup
from hvdlite.torch.elastic import keeping
from hvdlite.torch.elastic.handlers import StateHandler, get_handler_registry, set_handler_registry

# States.


def test_objects_go_back_to_the_last_save() -> None:
    state = hvd.elastic.ObjectState(epoch=1, history=[1])
    state.epoch, state.other = 2, 2
    state.history.append(2)
    state.save()
    for _ in range(2):
        state.epoch, state.other = 3, 3
        state.history.append(3)
        state.restore()
        assert (state.epoch, state.history, state.other) == (2, [1, 2], 3)


def test_a_state_before_its_first_save() -> None:
    state = hvd.elastic.ObjectState(epoch=1, history=[])
    state.epoch = 2
    state.history.append(2)
    state.restore()
    assert (state.epoch, state.history) == (1, [])


def test_a_name_that_is_taken() -> None:
    with pytest.raises(ValueError, match="ObjectState has a commit of its own; choose another name"):
        hvd.elastic.ObjectState(commit=1)


class Training:
    """Everything that a TorchState may hold, and steps whose results depend on all of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
        self.adam = torch.optim.Adam(self.a.parameters(), lr=0.1)
        self.sgd = torch.optim.SGD(self.b.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.adam, 0.5)
        self.state = hvd.elastic.TorchState(
            self.a, self.adam, second=self.b, second_optimizer=self.sgd, scheduler=self.scheduler, batch=0
        )

    def step(self) -> None:
        x = torch.full((4, 3), float(self.state.batch)) + torch.eye(4, 3)
        self.b(self.a(x)).square().sum().sin().backward()
        for optimizer in (self.adam, self.sgd):
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        self.state.batch += 1

    def content(self) -> list[Any]:
        parts = (self.a, self.b, self.adam, self.sgd, self.scheduler)
        return copy.deepcopy([*(part.state_dict() for part in parts), self.state.batch])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_training_goes_back_and_takes_the_same_way_again() -> None:
    training = Training()
    for _ in range(2):
        training.step()
    training.state.save()
    saved = training.content()
    ends = []
    for _ in range(3):
        for _ in range(3):
            training.step()
        ends.append(training.content())
        assert not same(ends[-1], saved)
        training.state.restore()
        assert same(training.content(), saved)
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])
    assert training.state.scheduler is training.scheduler


def test_a_model_that_was_replaced() -> None:
    state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), batch=0)
    assert state.optimizer is None
    state.model = replacement = torch.nn.Linear(2, 2)
    state.save()
    weight = replacement.weight.detach().clone()
    torch.nn.init.zeros_(replacement.weight)
    state.restore()
    assert state.model is replacement
    assert torch.equal(replacement.weight, weight)


def test_commit_asks_for_updates(universe: Universe) -> None:
    world = universe.start(3)
    state = hvd.elastic.ObjectState(epoch=0)
    state.epoch = 1
    state.commit()
    state.epoch = 2
    state.restore()
    assert state.epoch == 1
    assert world.names() == ["elastic.updates"]
    for result, skip_sync in [(1, True), (2, False), (3, False)]:
        state.epoch = 10 * result
        state.on_hosts_updated(0.0, result)
        with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is skip_sync
        state.restore()
        assert state.epoch == 10 * result
        state.check_host_updates()


def test_several_updates_are_one_interrupt(universe: Universe) -> None:
    universe.start(2)
    state = hvd.elastic.ObjectState()
    state.on_hosts_updated(0.0, 1)
    state.on_hosts_updated(1.0, 2)
    with pytest.raises(hvd.HostsUpdatedInterrupt):
        state.check_host_updates()
    state.check_host_updates()


def test_interrupts_pickle() -> None:
    assert pickle.loads(pickle.dumps(hvd.HostsUpdatedInterrupt(True))).skip_sync is True


# run.


def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState())


def test_what_is_no_state(universe: Universe) -> None:
    universe.start(2)

    @hvd.elastic.run
    def train(model: torch.nn.Module) -> None:
        """Never called."""

    with pytest.raises(ValueError, match=r"'train' was called with a Linear first; .* hvd\.elastic\.TorchState\(model"):
        train(torch.nn.Linear(1, 1))


class Diary(hvd.elastic.State):
    """Writes down what it is asked for."""

    def __init__(self, fail_in_sync: Exception | None = None) -> None:
        super().__init__()
        self.entries: list[str] = []
        self.fail_in_sync = fail_in_sync
        self.register_reset_callbacks([lambda: self.entries.append("first"), lambda: self.entries.append("second")])

    def save(self) -> None:
        self.entries.append("save")

    def restore(self) -> None:
        self.entries.append("restore")

    def abandon(self) -> None:
        self.entries.append("abandon")

    def sync(self) -> None:
        self.entries.append("sync")
        if self.fail_in_sync is not None:
            error, self.fail_in_sync = self.fail_in_sync, None
            raise error

    def share(self) -> None:
        self.entries.append("share")

    def reset(self) -> None:
        self.entries.append("reset")


@pytest.fixture
def diary(universe: Universe, monkeypatch: pytest.MonkeyPatch) -> Diary:
    diary = Diary()
    universe.start(2)
    monkeypatch.setattr(hvdlite, "restart", lambda **_: diary.entries.append("restart"), raising=False)
    return diary


def trainer(*outcomes: Exception | None) -> Callable[..., Any]:
    """A training function whose calls end in ``outcomes``, one after the other."""
    left = list(outcomes)

    @hvd.elastic.run
    def train(state: Diary, number: int, *, word: str) -> tuple[int, str]:
        """Its own."""
        state.entries.append("train")
        outcome = left.pop(0)
        if outcome is not None:
            raise outcome
        return number, word

    return train


CALLBACKS = ["reset", "first", "second"]
RESTART = ["restart", "abandon", "restore", *CALLBACKS, "sync"]


def test_run_without_a_failure(diary: Diary) -> None:
    train = trainer(None)
    assert train(diary, 7, word="w") == (7, "w")
    assert diary.entries == ["sync", "train"]
    assert (train.__name__, train.__doc__) == ("train", "Its own.")


def test_run_after_failures(diary: Diary) -> None:
    train = trainer(hvd.HorovodInternalError("one"), hvdlite.ShutDownError("two"), None)
    assert train(diary, 7, word="w") == (7, "w")
    assert diary.entries == ["sync", "train", *RESTART, "train", *RESTART, "train"]


def test_run_after_a_failure_while_it_starts(diary: Diary) -> None:
    diary.fail_in_sync = hvdlite.ShutDownError("another rank has failed again")
    assert trainer(None)(diary, 7, word="w") == (7, "w")
    assert diary.entries == ["sync", *RESTART, "train"]


def test_one_within_another_is_called_anew_by_that(diary: Diary) -> None:
    inner = trainer(hvd.HorovodInternalError("one"), None)

    @hvd.elastic.run
    def outer(state: Diary) -> Any:
        state.entries.append("outer")
        return inner(state, 7, word="w")

    assert outer(diary) == (7, "w")
    again = ["outer", "sync", "train"]
    assert diary.entries == ["sync", *again, "abandon", "restore", *RESTART, *again]


@pytest.mark.parametrize("skip_sync", [False, True])
def test_run_after_an_update(diary: Diary, skip_sync: bool) -> None:
    train = trainer(hvd.HostsUpdatedInterrupt(skip_sync), hvd.HostsUpdatedInterrupt(), hvd.HorovodInternalError(), None)
    train(diary, 7, word="w")
    again = [*CALLBACKS, "share"] if skip_sync else [*CALLBACKS, "sync"]
    assert diary.entries == ["sync", "train", *again, "train", *CALLBACKS, "sync", "train", *RESTART, "train"]


def test_a_mistake_of_the_program_is_raised(diary: Diary) -> None:
    """It would come again and again."""
    for mistake in (MismatchError("shape"), UsageError("op"), ValueError("v")):
        diary.entries.clear()
        with pytest.raises(type(mistake), match=str(mistake)):
            trainer(mistake)(diary, 7, word="w")
        assert diary.entries == ["sync", "train"]


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (
            RankFailedError(3, "rank 3 died"),
            "only under `hvdliterun --elastic` does a job go on after the failure of a rank",
        ),
        (StallError("rank 3 is late"), "the ranks live, but wait for one another"),
        (hvdlite.ShutDownError("rank 3 ended", is_final=True), "a rank has ended by itself"),
    ],
    ids=["died", "late", "left"],
)
def test_a_job_that_cannot_go_on_has_the_last_commit_and_a_clear_sentence(
    diary: Diary, failure: hvd.HorovodInternalError, why: str
) -> None:
    with pytest.raises(UnrecoverableError, match=f"cannot go on: {why}\\..*last commit.*{failure}") as e:
        trainer(failure)(diary, 7, word="w")
    assert e.value.__cause__ is failure
    assert diary.entries == ["sync", "train", "restore"]


def test_ranks_that_begin_anew_end_in_order_though_their_keeper_is_stopped(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        def begin_anew(self) -> None:
            raise TimeoutError("it is stopped")

    monkeypatch.setattr(diary, "keep", lambda: None)
    monkeypatch.setattr(default_runtime, "peers", lambda: SimpleNamespace(keeper=Stopped()))
    with pytest.raises(SystemExit) as end:
        keeping.end_to_begin_anew(diary, HostsUpdatedInterrupt())
    assert end.value.code == 0


def test_process_sets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with their numbers, also where sets between them are no more."""

    class Sets:
        """The process sets of one start."""

        def __init__(self) -> None:
            self.numbers = 0
            self.members = {0: [0, 1, 2, 3]}
            self.config = Config()
            self.recorder = Recorder()

        def add_group(self, ranks: Sequence[int]) -> tuple[int, None]:
            assert list(ranks) not in self.members.values()
            self.numbers += 1
            self.members[self.numbers] = list(ranks)
            return self.numbers, None

        def remove_group(self, number: int) -> None:
            del self.members[number]

        def process_sets(self) -> dict[int, list[int]]:
            return dict(self.members)

    starts = [Sets()]
    monkeypatch.setattr(hvdlite, "runtime", lambda: starts[-1])
    monkeypatch.setattr(hvdlite, "restart", lambda **_: starts.append(Sets()), raising=False)
    before = starts[0]
    for ranks in ([0, 1], [2], [1, 2], [0, 3], [3]):
        before.add_group(ranks)
    for number in (1, 2, 4):
        before.remove_group(number)
    startup.restart()
    assert len(starts) == 2
    assert list(starts[1].members.items()) == [(0, [0, 1, 2, 3]), (3, [1, 2]), (5, [3])]
    assert starts[1].add_group([0])[0] == 6


class Counter:
    """Of a type that nobody else knows how to save."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()  # which cannot be copied


class CounterHandler(StateHandler):
    synced = 0

    def __init__(self, value: Counter) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        CounterHandler.synced += 1


@pytest.mark.parametrize("registers", ["set", "append"])
def test_a_handler_for_a_type_of_one_s_own(universe: Universe, registers: str) -> None:
    before = get_handler_registry()
    set_handler_registry([*before, (Counter, CounterHandler)] if registers == "set" else [*before])
    try:
        if registers == "append":
            get_handler_registry().append((Counter, CounterHandler))
        state = hvd.elastic.TorchState(counter=Counter(), epoch=0)
    finally:
        set_handler_registry(before)
    state.counter.count, state.epoch = 5, 1
    state.restore()
    assert (state.counter.count, state.epoch) == (0, 0)
    state.counter.count = 3
    state.save()
    state.counter.count = 9
    state.restore()
    assert state.counter.count == 3
    state.counter = Counter()  # another one, which is saved as it is
    state.counter.count = 8
    state.restore()
    assert state.counter.count == 0
    universe.start(2)
    synced = CounterHandler.synced
    state.sync()
    assert CounterHandler.synced == synced + 1
    assert hvd.elastic.TorchState(epoch=1).epoch == 1
