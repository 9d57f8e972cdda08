"""Parameters, optimizer state and objects between real ranks."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError
from hvdlite.torch import functions

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(4),  # has an int64 scalar
        torch.nn.Flatten(),
        torch.nn.Linear(4, 2).double(),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "entries",
    [
        lambda m: m.state_dict(),
        lambda m: collections.OrderedDict(reversed(m.state_dict().items())) if hvd.rank() else m.state_dict(),
        lambda m: list(m.state_dict().items()),
        lambda m: (item for item in m.state_dict().items()),
        lambda m: [*m.parameters(), *m.buffers()],
        lambda m: {**m.state_dict(), "nothing": None},
    ],
    ids=["dict", "other order", "list of pairs", "generator", "tensors", "with None"],
)
def test_broadcast_parameters(entries: Callable[[torch.nn.Module], Any]) -> None:
    for root in range(hvd.size()):
        model = model_of(hvd.rank())
        hvd.broadcast_parameters(entries(model), root)
        assert same(model.state_dict(), model_of(root).state_dict())
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_of_every_kind() -> None:
    model = model_of(hvd.rank())
    hvd.broadcast_parameters(model.named_parameters(), 0)
    hvd.broadcast_parameters([], 0)
    hvd.broadcast_parameters({}, 0)
    with pytest.raises(ValueError, match="'a' is a float"):
        hvd.broadcast_parameters({"a": 1.0}, 0)
    for whole in (torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1))):
        with pytest.raises(ValueError, match=r"is a (Linear|Sequential); pass model.state_dict\(\)"):
            hvd.broadcast_parameters(whole, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 is a tuple, not a tensor"):
        hvd.broadcast_parameters([torch.ones(1), ("a", "b", "c")], 0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'broadcast_parameters' of 'b': .* is expanded.*clone"):
        hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(1).expand(3)}, 0)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_parameters(model.state_dict(), hvd.size())


def test_parameters_with_keys_of_several_types() -> None:
    entries: dict[Any, torch.Tensor] = {key: torch.tensor([float(hvd.rank())]) for key in (1, "1", "a", (2, "b"))}
    if hvd.rank():
        entries = dict(reversed(entries.items()))
    entries[1] += 100
    hvd.broadcast_parameters(entries, 0)
    assert {key: tensor.item() for key, tensor in entries.items()} == {1: 100.0, "1": 0.0, "a": 0.0, (2, "b"): 0.0}


def test_parameters_that_differ() -> None:
    if hvd.size() == 1:
        pytest.skip("ranks cannot contradict one another where there is one")
    with pytest.raises(MismatchError, match=r"'b' has shape \(1,\) on .* but \(2,\) on ranks? 1.*same model"):
        hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(1 + hvd.rank() % 2)}, 0)
    with pytest.raises(MismatchError, match=r"number 2 of them is missing \(there are 1\) on .* but 'b' on "):
        hvd.broadcast_parameters({name: torch.ones(1) for name in "abcdef"[: 1 + hvd.rank() % 2]}, 0)
    with pytest.raises(MismatchError, match="root rank is 0 on"):  # what says that stays
        hvd.broadcast_parameters({"a": torch.ones(1, requires_grad=hvd.rank() == 0)}, hvd.rank() % 2)


def test_optimizers_that_differ() -> None:
    if hvd.size() == 1:
        pytest.skip("ranks cannot contradict one another where there is one")
    odd = hvd.rank() == 1
    layer = torch.nn.Linear(4, 2 + odd)
    with pytest.raises(ValueError, match=r"'group0\.0' has shape \(2, 4\) on .* but \(3, 4\) on rank 1.*same model"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), 0)
    kind = torch.optim.Adam if odd else torch.optim.SGD
    with pytest.raises(ValueError, match=r"optimizer is SGD on rank 0 but Adam on rank 1; build the same"):
        hvd.broadcast_optimizer_state(kind(torch.nn.Linear(4, 2).parameters(), lr=0.1), 0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p)


def stepped(name: str, seed: int, steps: int, wrapped: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model_of(seed)
    optimizer = OPTIMIZERS[name]([{"params": model[0].parameters()}, {"params": model[3].parameters()}])
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 3, 3, 3)
        model[3](model[2](model[1](model[0](x))).double()).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.not_with_three_ranks
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("resumed_everywhere", [False, True])
def test_broadcast_optimizer_state(name: str, resumed_everywhere: bool) -> None:
    """Only the root has taken steps, or all have, but not the same ones."""
    root = hvd.size() - 1
    is_root = hvd.rank() == root
    model, optimizer = stepped(name, hvd.rank(), 3 if is_root else int(resumed_everywhere))
    if is_root:
        optimizer.param_groups[1]["lr"] = 0.0123
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    hvd.broadcast_optimizer_state(optimizer, root)
    states = hvd.allgather_object(optimizer.state_dict())
    assert all(same(state, states[root]) for state in states)
    assert same(states[root]["param_groups"][1]["lr"], 0.0123)
    assert same(model.state_dict(), weights)
    assert all(parameter.grad is None or is_root or resumed_everywhere for parameter in model.parameters())
    # And it is a state that steps.
    hvd.broadcast_parameters(model.state_dict(), root)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = hvd.allgather_object(model.state_dict())
    assert all(same(state, after[0]) for state in after)


def test_gradients_of_a_wrapped_optimizer_are_zeros() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, frozen], lr=0.1, momentum=0.9))
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert weight.grad is not None and frozen.grad is None
    assert hvd.broadcast(weight.grad, 0).tolist() == [0.0] * 4
    assert not optimizer.state


def test_sparse_adam_steps_without_zero_grad_after_it() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(model.parameters()), model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    model(torch.tensor([1, hvd.rank() % 4])).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 1


def test_optimizer_state_of_a_wrapped_optimizer() -> None:
    model, optimizer = stepped("Adam", hvd.rank(), 2, wrapped=True)
    for group in optimizer.param_groups:
        group["lr"] = float(hvd.rank() + 1)
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    states = hvd.allgather_object(optimizer.state_dict())
    assert all(same(state, states[0]) for state in states)


def test_optimizer_state_beside_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if hvd.rank() == 0:
        optimizer.state["seen"] = {"steps": 7, "history": [torch.ones(3), (torch.arange(2),)]}
    hvd.broadcast_optimizer_state(optimizer, 0)
    seen: Any = optimizer.state["seen"]
    assert same(seen, {"steps": 7, "history": [torch.ones(3), (torch.arange(2),)]})


def test_a_learning_rate_of_the_program_stays_that_of_all_groups() -> None:
    rate = torch.tensor(1.0 + hvd.rank())
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(2)], lr=rate)
    hvd.broadcast_optimizer_state(optimizer, 0)
    rate.mul_(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [rate, rate] == [0.5, 0.5]


def test_tensors_that_groups_of_the_root_share() -> None:
    """And those which the other ranks share, but the root does not."""
    root, others = ("a", "a"), ("a", "b")
    for names in (root, others), (others, root):
        mine = names[hvd.rank() != 0]
        rates = {name: torch.tensor(1.0 + number) for number, name in enumerate("ab")}
        optimizer = torch.optim.SGD(
            [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rates[name]} for name in mine], lr=0.1
        )
        hvd.broadcast_optimizer_state(optimizer, 0)
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert (first is second) == (names[0] is root)
        assert [first, second] == [1.0, 1.0 if names[0] is root else 2.0]


def test_optimizer_state_of_unusual_tensors() -> None:
    """Only the root has them, so others cannot tell why it would not send them."""
    unusual = {
        "sparse": torch.eye(3).to_sparse(),
        "expanded": torch.tensor([2.0]).expand(4),
        "complex": torch.tensor([1 + 2j]),
        "float8": torch.arange(6.0)[::2].to(torch.float8_e5m2),
        "usual": torch.tensor([3.0]),
    }
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == 0:
        optimizer.state[model.weight] = {**unusual, "several": [unusual["sparse"], unusual["usual"]]}
    hvd.broadcast_optimizer_state(optimizer, 0)
    received = optimizer.state[model.weight]
    for name, tensor in unusual.items():
        assert received[name].layout is tensor.layout
        assert received[name].dtype is tensor.dtype
        assert received[name].to_dense().tolist() == tensor.to_dense().tolist()
    assert received["several"][0].is_sparse
    assert received["several"][1] is received["usual"]


def test_optimizer_state_that_cannot_be_broadcast() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(parameters), 0)
    with pytest.raises(ValueError, match="pass the optimizer, not its state_dict"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(parameters).state_dict(), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is a NoneType; pass the optimizer"):
        hvd.broadcast_optimizer_state(None, 0)  # type: ignore[arg-type]
    if hvd.size() > 1:
        optimizer = torch.optim.SGD(parameters[: 2 + hvd.rank() % 2], lr=0.1)
        with pytest.raises(ValueError, match=r"groups are \[2\] on rank 0 but \[3\] on rank 1"):
            hvd.broadcast_optimizer_state(optimizer, 0)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


@pytest.mark.parametrize("name", [None, "objects"])
def test_objects(name: str | None) -> None:
    local = 3
    for root in range(hvd.size()):
        sent = {"rank": hvd.rank(), "f": lambda x: x + local, "t": torch.arange(hvd.rank() + 1), "b": b"x" * 3_000_000}
        received = hvd.broadcast_object(sent, root, name=name)
        assert received["rank"] == root
        assert received["f"](1) == 4
        assert len(received["b"]) == 3_000_000
        assert torch.equal(received["t"], torch.arange(root + 1))
        if hvd.rank() == root:
            assert received is sent
    assert hvd.broadcast_object(None) is None
    assert hvd.allgather_object(("r", hvd.rank()), name) == [("r", rank) for rank in range(hvd.size())]
    assert hvd.allgather_object("x" * 100_000 * hvd.rank()) == ["x" * 100_000 * rank for rank in range(hvd.size())]


def test_objects_of_another_type_on_every_rank() -> None:
    """Names derived from the type would never match."""
    mine = [1, "a", None, 2.0][hvd.rank() % 4]
    assert hvd.broadcast_object(mine, 0) == 1
    assert hvd.allgather_object(mine) == [[1, "a", None, 2.0][rank % 4] for rank in range(hvd.size())]


def test_what_one_rank_cannot_pickle_raises_on_all() -> None:
    last = hvd.size() - 1
    for _ in range(2):
        with pytest.raises(ValueError, match=f"rank {last} cannot pickle.*RuntimeError: I stay here"):
            hvd.broadcast_object(Unpicklable(), last)
        with pytest.raises(ValueError, match=f"rank {last} cannot pickle.*RuntimeError: I stay here"):
            hvd.allgather_object(Unpicklable() if hvd.rank() == last else 1)


@pytest.mark.parametrize("chunk_bytes", [100, 4096])
def test_objects_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """As objects above 2 GiB are sent, but in smaller ones."""
    monkeypatch.setattr(functions, "_CHUNK_BYTES", chunk_bytes)
    objects = [bytes(range(256)) * (5 * rank) + b"end" for rank in range(hvd.size())]
    for root in range(hvd.size()):
        assert hvd.broadcast_object(objects[hvd.rank()], root, name="chunks") == objects[root]
        assert hvd.allgather_object(objects[hvd.rank()], name="chunks") == objects
    with pytest.raises(ValueError, match=r"rank 0 cannot pickle.*I stay here"):
        hvd.allgather_object(Unpicklable() if hvd.rank() == 0 else objects)


def test_tensors_inside_objects() -> None:
    for root in range(hvd.size()):
        weight = torch.nn.Parameter(torch.full((2, 3), float(hvd.rank())))
        image = torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last)
        shared = torch.arange(4.0) + hvd.rank()
        sent = {"weight": weight, "image": image, "part": shared[1:].requires_grad_(), "bf16": shared.bfloat16()}
        received = hvd.broadcast_object(sent, root)
        assert isinstance(received["weight"], torch.nn.Parameter)
        assert received["weight"].requires_grad
        assert torch.equal(received["weight"], torch.full((2, 3), float(root)))
        assert received["image"].is_contiguous(memory_format=torch.channels_last)
        assert received["bf16"].tolist() == [root + i for i in range(4)]
        assert received["part"].tolist() == [root + i for i in range(1, 4)]
        assert received["part"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_tensors_inside_objects_that_torch_pickles_unreadably(dtype: torch.dtype) -> None:
    """Of an element type that came after torch's typed storages."""
    large = torch.arange(100_000).remainder(8).to(dtype)
    payload, _ = functions._pickled({"part": large[:6].view(2, 3)})
    assert payload.numel() < 10_000
    sent = {"scalar": large[3], "part": large[:6].view(2, 3), "none": large[:0]}
    for received in hvd.allgather_object(sent):
        assert {name: tensor.dtype for name, tensor in received.items()} == dict.fromkeys(sent, dtype)
        assert {name: tensor.tolist() for name, tensor in received.items()} == {
            "scalar": 3,
            "part": [[0, 1, 2], [3, 4, 5]],
            "none": [],
        }


def test_a_part_of_a_tensor_brings_no_more_along() -> None:
    large = torch.arange(1_000_000.0)
    parts = [large[:3], large[::250_000], large[5:5], large.reshape(1000, 1000)[:2, 1:].t()]
    payload, _ = functions._pickled(parts)
    assert payload.numel() < 20_000
    for received in hvd.allgather_object(parts):
        assert all(map(torch.equal, received, parts))


class OnlyAt:
    """Pickles everywhere, but unpickles on one rank only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return _arrive, (self.rank,)


def _arrive(rank: int) -> OnlyAt:
    if hvd.rank() != rank:
        raise ModuleNotFoundError("No module named 'elsewhere'")
    return OnlyAt(rank)


def test_what_a_rank_cannot_unpickle() -> None:
    if hvd.rank() == 0:
        assert isinstance(hvd.broadcast_object(OnlyAt(0), 0), OnlyAt)
        assert len(hvd.allgather_object(OnlyAt(0))) == hvd.size()
    else:
        text = (
            f"rank {hvd.rank()} cannot unpickle the object of rank 0: ModuleNotFoundError: No module named 'elsewhere'"
        )
        with pytest.raises(ValueError, match=text):
            hvd.broadcast_object(None, 0)
        with pytest.raises(ValueError, match=text):
            hvd.allgather_object(OnlyAt(0))


def test_parameters_are_one_operation() -> None:
    """Whatever their number and types are."""
    model = model_of(hvd.rank())
    before = hvd.statistics()["submissions"]
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert hvd.statistics()["submissions"] == before + 1
