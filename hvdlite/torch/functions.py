"""Start and resume: parameters, optimizer state and any picklable object from one rank to all, or from all to all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch

import hvdlite
from hvdlite.errors import MismatchError
from hvdlite.torch.allgather import allgather
from hvdlite.torch.broadcast import broadcast_
from hvdlite.torch.device import is_on_device
from hvdlite.torch.eager import eager
from hvdlite.torch.handle import check_name
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.same_parameters import first_difference, identity_of
from hvdlite.torch.start import start_broadcast
from hvdlite.torch.tensor_view import check_tensor, gradient_dtype, is_expanded


@eager
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite ``params`` with those of rank ``root_rank``, all in one broadcast.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()`` or the like; the same
            names, shapes and dtypes on every rank. Entries that are None are left out.
        root_rank: the global rank.
        process_set: who takes part.

    Raises:
        ValueError: something in ``params`` is no tensor; there is no such rank.
        MismatchError: ranks passed different tensors.
    """
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(f"broadcast_parameters: params is a {type(params).__name__}; pass model.state_dict()")
    # Sorted, since ranks may have filled their dictionaries in another order; by repr, as keys may be of several types.
    entries: Iterable[Any] = params
    if isinstance(params, Mapping):
        entries = sorted(params.items(), key=lambda entry: repr(entry[0]))
    named = [entry if isinstance(entry, tuple) and len(entry) == 2 else (i, entry) for i, entry in enumerate(entries)]
    for name, tensor in named:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name!r} is a {type(tensor).__name__}, not a tensor; leave it out and send it "
                "with hvd.broadcast_object"
            )
    present = [(str(name), tensor) for name, tensor in named if tensor is not None]
    if present:
        names = [name for name, _ in present]
        tensors = [tensor for _, tensor in present]
        try:
            _broadcast_now(tensors, root_rank, "broadcast_parameters", names, process_set)
        except MismatchError:
            found = first_difference(present, "broadcast_parameters.parameters", process_set)
            if found is None:  # they differ in something else
                raise
            raise MismatchError(f"hvd.broadcast_parameters() was given different tensors: {found}") from None


def _broadcast_now(
    tensors: Sequence[torch.Tensor], root_rank: int, name: str, names: Sequence[str], process_set: ProcessSet
) -> None:
    start_broadcast(tensors, root_rank, name, names, process_set, background=False).synchronize()


@eager
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give ``optimizer`` the state and the options (lr, ...) of rank ``root_rank``'s.

    State is created where a rank has none; no optimizer step is taken, so weights and step counts stay as they are.
    With a `DistributedOptimizer` a parameter without gradient then has one of zeros, which Horovod's programs read,
    unless it is a SparseAdam, which takes no dense gradients.

    Args:
        optimizer: wrapped or not; with the same parameter groups on every rank.
        root_rank: the global rank.
        model: not needed; Horovod has this argument.
        process_set: who takes part.

    Raises:
        ValueError: ``optimizer`` is none, or LBFGS, whose state cannot be split by parameter; the parameter
            groups differ, or the shapes of their parameters, or the kinds of optimizers.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"broadcast_optimizer_state: optimizer is a {type(optimizer).__name__}; pass the optimizer, not its "
            "state_dict()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state cannot handle LBFGS; send its state_dict with hvd.broadcast_object")
    groups = optimizer.param_groups
    _check_same_groups(optimizer, process_set)
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_root = global_process_set.rank() == root_rank

    tensors: list[torch.Tensor] = []
    state: list[tuple[bool, Any, Any]]
    failure, payload = None, None
    if is_root:
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        # Keys are parameters, sent as numbers; some optimizers have others as well.
        state = [(id(key) in number, number.get(id(key), key), value) for key, value in optimizer.state.items()]
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        payload, failure = _pickled((state, options), tensors)
    received = _broadcast_bytes(payload, failure, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        gpu = next((parameter.device for parameter in parameters if is_on_device(parameter)), torch.device("cpu"))
        state, options = _Unpickler(io.BytesIO(received.numpy().data), tensors, gpu).load()
    if tensors:
        names = [str(i) for i in range(len(tensors))]
        _broadcast_now(tensors, root_rank, "broadcast_optimizer_state", names, process_set)
    if isinstance(optimizer, DistributedOptimizer) and not isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    if not is_root:
        optimizer.state.clear()
        optimizer.state.update((parameters[key] if is_number else key, value) for is_number, key, value in state)
        _take_options(groups, options)


def _take_options(groups: Sequence[dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
    """Give ``groups`` the values of ``options``.

    Tensors (lr, for example) go into those that the groups have, since the program may change them there. Several
    groups have one tensor where those of the root do.
    """
    places: dict[int, torch.Tensor] = {}  # of tensors that have arrived
    filled: set[int] = set()
    for group, values in zip(groups, options, strict=True):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and id(value) not in places:
                own = group.get(key)
                if isinstance(own, torch.Tensor) and id(own) not in filled and _same_kind(own, value):
                    own.detach().copy_(value)
                    filled.add(id(own))
                    places[id(value)] = own
                else:
                    places[id(value)] = value
            group[key] = places.get(id(value), value)


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device


def _check_same_groups(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    named = [
        (f"group{number}.{place}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    own = {
        "the optimizer is": type(optimizer).__name__,
        "the numbers of parameters of its groups are": [len(group["params"]) for group in optimizer.param_groups],
        "the checksum of their shapes is": identity_of(named),
    }
    everywhere = allgather_object(own, process_set=process_set)
    ranks = process_set.ranks
    for rank, others in zip(ranks, everywhere, strict=True):
        what = next((what for what in own if others[what] != everywhere[0][what]), None)
        if what is not None:
            found = first_difference(named, "broadcast_optimizer_state.parameters", process_set)
            differs = f"{what} {everywhere[0][what]} on rank {ranks[0]} but {others[what]} on rank {rank}"
            shapes = f": {found}" if found is not None else "; build the same optimizer on every rank"
            raise ValueError(f"broadcast_optimizer_state: {differs}{shapes}")


@eager
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank ``root_rank``'s ``obj``, on every rank: whatever cloudpickle can pickle, of any size.

    Args:
        obj: on other ranks than the root it is ignored.
        root_rank: the global rank.
        name: the same on every rank; unnamed calls are counted.
        process_set: who takes part.

    Raises:
        ValueError: on every rank, if the root cannot pickle ``obj``; on a rank that cannot unpickle it.
    """
    check_name("broadcast_object", name)
    check_process_set(process_set).group()  # raises where this rank cannot take part, before anything else does
    payload, failure = _pickled(obj) if hvdlite.runtime().rank == root_rank else (None, None)
    received = _broadcast_bytes(payload, failure, root_rank, name, process_set)
    return obj if payload is not None else _unpickled(received, root_rank)


@eager
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The ``obj`` of every rank, in the order of ranks: whatever cloudpickle can pickle, of any size.

    Raises:
        ValueError: on every rank, if one of them cannot pickle its ``obj``; on a rank that cannot unpickle one.
    """
    check_name("allgather_object", name)
    payload, failure = _pickled(obj)
    headers = allgather(_header(payload, failure).unsqueeze(0), _derived(name, "size"), process_set)
    pieces = _allgather_bytes(payload, headers[:, 0].tolist(), name, process_set)
    arrived = list(zip(process_set.ranks, headers, pieces, strict=True))
    for rank, header, piece in arrived:
        _check_pickled(header, piece, rank)
    return [_unpickled(piece, rank) for rank, _, piece in arrived]


# Per operation, of all ranks together: below the 2 GiB where 32-bit counts of bytes end.
_CHUNK_BYTES = 1 << 30

# A tensor of bytes travels behind a header of (number of bytes, 1 if they are not a pickle but the reason why not),
# so that an object that one rank cannot pickle raises on every rank, instead of leaving the others waiting.


def _pickled(obj: Any, tensors: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, Exception | None]:
    """``obj`` as a tensor of bytes, or why not (and that as bytes). Tensors in it go to ``tensors``, where given."""
    buffer = io.BytesIO()
    failure = None
    try:
        (_ObjectPickler(buffer) if tensors is None else _Pickler(buffer, tensors)).dump(obj)
    except Exception as error:  # whatever __reduce__ of a user's class raises
        failure = error
        buffer = io.BytesIO(f"{type(error).__name__}: {error}".encode(errors="replace"))
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), failure


def _header(payload: torch.Tensor, failure: Exception | None) -> torch.Tensor:
    return torch.tensor([payload.numel(), failure is not None], dtype=torch.int64, device="cpu")


def _check_pickled(header: torch.Tensor, piece: torch.Tensor, rank: int) -> None:
    if header[1]:
        raise ValueError(f"rank {rank} cannot pickle its object: {piece.numpy().tobytes().decode()}")


def _unpickled(piece: torch.Tensor, rank: int) -> Any:
    try:
        return pickle.loads(piece.numpy().data)
    except Exception as error:  # whatever a user's class raises, or an import that fails
        raise ValueError(
            f"rank {global_process_set.rank()} cannot unpickle the object of rank {rank}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _broadcast_bytes(
    payload: torch.Tensor | None,
    failure: Exception | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> torch.Tensor:
    """``payload`` of the root, where alone it is given, on every rank."""
    header = torch.zeros(2, dtype=torch.int64, device="cpu") if payload is None else _header(payload, failure)
    broadcast_(header, root_rank, _derived(name, "size"), process_set)
    received = torch.empty(int(header[0]), dtype=torch.uint8, device="cpu") if payload is None else payload
    for chunk in torch.split(received, _CHUNK_BYTES):
        broadcast_(chunk, root_rank, _derived(name, "data"), process_set)
    _check_pickled(header, received, root_rank)
    return received


def _allgather_bytes(
    payload: torch.Tensor, sizes: list[int], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """The ``payload`` of every rank, of ``sizes`` bytes."""
    name = _derived(name, "data")
    chunk = max(1, _CHUNK_BYTES // len(sizes))
    if max(sizes) <= chunk:
        return list(torch.split(allgather(payload, name, process_set), sizes))
    pieces = [torch.empty(size, dtype=torch.uint8, device=payload.device) for size in sizes]
    for begin in range(0, max(sizes), chunk):
        parts = [min(max(size - begin, 0), chunk) for size in sizes]
        gathered = torch.split(allgather(payload[begin : begin + chunk], name, process_set), parts)
        for piece, part in zip(pieces, gathered, strict=True):
            piece[begin : begin + part.numel()] = part
    return pieces


def _derived(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


class _ObjectPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends of a tensor what it shows; torch would send all memory behind it, of a gradient a whole fusion buffer."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.layout is torch.strided:
            is_part = obj.untyped_storage().nbytes() > obj.numel() * obj.element_size()
            shown = obj.detach().clone().requires_grad_(obj.requires_grad) if is_part else obj
            if not _can_be_broadcast(shown):  # of float8, for example, which torch pickles such that nobody can read it
                return _loaded, (_saved(shown),)
            if is_part:
                return shown.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def _saved(tensor: torch.Tensor) -> bytes:
    """``tensor`` as `torch.save` writes it, which knows every element type."""
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _loaded(saved: bytes) -> torch.Tensor:
    """What `_saved` has written."""
    tensor: torch.Tensor = torch.load(io.BytesIO(saved), weights_only=False)
    return tensor


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves the contents of tensors out, and collects the tensors, each once; but for those that are not broadcast."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not _can_be_broadcast(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(obj)
        return number, obj.shape, torch.empty_like(obj, device="meta").stride(), obj.dtype, is_on_device(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):  # as a whole: what is in it is there when it is made
            file = io.BytesIO()
            _ObjectPickler(file).dump(obj)
            return pickle.loads, (file.getvalue(),)
        return super().reducer_override(obj)


def _can_be_broadcast(tensor: torch.Tensor) -> bool:
    """Sparse tensors, for example, cannot; nor those that are expanded, in which elements share a place."""
    try:
        check_tensor(tensor, "state")
    except ValueError:
        return False
    return not is_expanded(tensor)


class _Unpickler(pickle.Unpickler):
    """Makes an empty tensor where `_Pickler` found one, and collects them in the same order.

    Args:
        gpu: of this rank, for those that are on the GPU of the other.
    """

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], gpu: torch.device) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._gpu = gpu

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number: int
        number, shape, stride, dtype, is_on_device = pid
        if number == len(self._tensors):
            device = self._gpu if is_on_device else "cpu"
            self._tensors.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        return self._tensors[number]
