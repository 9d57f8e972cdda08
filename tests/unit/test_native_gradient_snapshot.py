"""What native code sees of gradients: which have changed, and where those lie that are as autograd makes them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import exchange_lab
from hvdlite import _native
from hvdlite.dtypes import DType

asked = exchange_lab.asked

pytestmark = pytest.mark.usefixtures("asked")


def parameters(count: int = 3) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(count)]
    for i, parameter in enumerate(made):
        parameter.grad = torch.full((2, 3), float(i))
    return made


def taken(of: list[torch.nn.Parameter]) -> _native.GradientSnapshot:
    snapshot = _native.GradientSnapshot()
    snapshot.take(of)
    return snapshot


def replace(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def change(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1)


def drop(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


@pytest.mark.parametrize("how", [replace, change, drop])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_was_replaced_changed_or_dropped_is_not_as_it_was(
    how: Callable[[torch.nn.Parameter], None], which: int
) -> None:
    some = parameters()
    snapshot = taken(some)
    assert snapshot.are_unchanged(some)
    how(some[which])
    assert not snapshot.are_unchanged(some)


def test_a_gradient_that_has_come_since_is_not_as_it_was() -> None:
    some = parameters()
    drop(some[0])
    snapshot = taken(some)
    assert snapshot.versions[0] == 0
    assert snapshot.gradients[0] is None
    assert snapshot.are_unchanged(some)
    some[0].grad = torch.zeros(2, 3)
    assert not snapshot.are_unchanged(some)


def test_a_gradient_lives_while_it_is_noted() -> None:
    """Else another one could take its place, and be as often changed."""
    some = parameters(1)
    snapshot = taken(some)
    address = id(some[0].grad)
    drop(some[0])
    assert id(snapshot.gradients[0]) == address
    snapshot.drop()
    assert snapshot.gradients == []


def located(some: list[torch.nn.Parameter], numels: tuple[int, ...] = (6, 6, 6)) -> list[float] | None:
    """The first element of each gradient, as native code reads it; None where it refuses them."""
    snapshot = taken(some)
    tensors = _native.TensorList([0] * len(numels), numels, [10 * i for i in range(len(numels))])
    if not snapshot.locate(tensors, torch.Tensor, torch.strided, torch.float32):
        return None
    block = torch.zeros(10 * len(numels))
    tensors.pack(block.data_ptr(), 0, block.numel(), DType.FLOAT32, DType.FLOAT32)
    return block[::10].tolist()


def test_gradients_are_found_where_they_lie() -> None:
    assert located(parameters()) == [0.0, 1.0, 2.0]


def test_those_that_were_found_have_changed_if_they_lie_elsewhere() -> None:
    """``p.grad.data = ...`` keeps the tensor and its version."""
    some = parameters()
    tensors = _native.TensorList([0] * 3, [6] * 3, [0, 6, 12])
    snapshot = taken(some)
    assert snapshot.addresses == []
    assert snapshot.locate(tensors, torch.Tensor, torch.strided, torch.float32)
    assert snapshot.addresses == [some[i].grad.data_ptr() for i in range(3)]  # type: ignore[union-attr]
    assert snapshot.are_unchanged(some)
    some[1].grad.data = torch.zeros(2, 3)  # type: ignore[union-attr]
    assert not snapshot.are_unchanged(some)
    snapshot.take(some)
    assert snapshot.addresses == []


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "gradient",
    [
        None,
        torch.zeros(3, 2).T,
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3).as_subclass(Subclass),
    ],
    ids=["missing", "transposed", "with gaps", "sparse", "a subclass"],
)
def test_others_are_refused(gradient: torch.Tensor | None) -> None:
    some = parameters()
    some[2].grad = gradient
    assert located(some) is None


def test_those_of_another_type_or_size_are_refused() -> None:
    some = parameters()
    assert located(some, (6, 6, 5)) is None
    doubles = [torch.nn.Parameter(torch.zeros(6, dtype=torch.float64)) for _ in range(3)]
    for parameter in doubles:
        parameter.grad = torch.zeros(6, dtype=torch.float64)
    assert located(doubles) is None


TYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
TYPES = [dtype for dtype in TYPES if not str(dtype).startswith("torch.q")]  # quantized


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_type_passes_for_another(dtype: torch.dtype) -> None:
    first = SimpleNamespace(grad=torch.empty(6, dtype=dtype))
    for other in TYPES:
        some = [first, SimpleNamespace(grad=torch.empty(6, dtype=other))]
        snapshot = _native.GradientSnapshot()
        snapshot.take(some)
        tensors = _native.TensorList([0, 0], [6, 6], [0, 6])
        assert snapshot.locate(tensors, torch.Tensor, torch.strided, dtype) is (other is dtype), other


@pytest.mark.parametrize(
    ("made", "is_dense"),
    [
        (torch.ones(1, 6)[:, ::2].expand(1, 3), False),
        (torch.ones(6, 1, 1).as_strided((6, 1, 1), (1, 7, 9)), True),
        (torch.ones(3).expand(2, 3), False),
        (torch.ones(2, 3, 2, 1).to(memory_format=torch.channels_last), False),
        (torch.ones(()), True),
        (torch.ones(0, 3).T, True),
        (torch.ones(9)[3:], True),
    ],
    ids=["every second", "strides that say nothing", "expanded", "channels last", "a number", "empty", "a part"],
)
def test_gaps_are_seen_as_torch_sees_them(made: torch.Tensor, is_dense: bool) -> None:
    assert made.is_contiguous() is is_dense
    one = SimpleNamespace(grad=torch.ones(made.numel()))
    snapshot = _native.GradientSnapshot()
    snapshot.take([one, SimpleNamespace(grad=made)])
    numel = made.numel()
    tensors = _native.TensorList([0, 0], [numel, numel], [0, numel])
    assert snapshot.locate(tensors, torch.Tensor, torch.strided, torch.float32) is is_dense


def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="incorrect name"):
        _native.exchange_tensors_by(torch.utils.dlpack.to_dlpack(torch.ones(1)))


def test_one_that_reads_as_minus_what_is_there_is_refused() -> None:
    one = torch.nn.Parameter(torch.zeros(1))
    one.grad = torch.full((1,), 2j).imag
    assert located([one], (1,)) == [2.0]
    one.grad = torch.full((1,), 2j).conj().imag
    assert located([one], (1,)) is None


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_those_that_share_memory_are_refused(shift: int) -> None:
    """As autograd makes them of ``p[None] + q[None]``: to write one would change the other."""
    some = parameters()
    memory = torch.arange(20.0)
    some[0].grad = memory[shift : shift + 6].view(2, 3)
    some[2].grad = memory[:6].view(2, 3)
    assert located(some) is None
    some[0].grad = memory[6:12].view(2, 3)  # side by side
    assert located(some) == [6.0, 1.0, 0.0]


def test_gradients_without_elements_share_nothing() -> None:
    some = [torch.nn.Parameter(torch.zeros(0)) for _ in range(3)]
    for parameter in some:
        parameter.grad = torch.zeros(0)
    tensors = _native.TensorList([0] * 3, [0] * 3, [0] * 3)
    assert taken(some).locate(tensors, torch.Tensor, torch.strided, torch.float32)


def test_a_gradient_with_a_graph_is_seen() -> None:
    some = parameters()
    assert not taken(some).require_grad()
    some[1].grad = torch.zeros(2, 3, requires_grad=True)
    assert taken(some).require_grad()
    drop(some[1])
    assert not taken(some).require_grad()


def test_other_parameters_are_refused() -> None:
    snapshot = taken(parameters(3))
    with pytest.raises(ValueError, match="other parameters"):
        snapshot.are_unchanged(parameters(2))
    with pytest.raises(ValueError, match="a tensor per gradient"):
        snapshot.locate(_native.TensorList([0], [6], [0]), torch.Tensor, torch.strided, torch.float32)


def test_errors_of_attributes_are_raised() -> None:
    with pytest.raises(AttributeError, match="grad"):
        taken([object()])  # type: ignore[list-item]
