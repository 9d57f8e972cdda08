"""torch on a simulated GPU: what it does to tensors there is enqueued on a stream, and done later, as on a real one.

torch's CPU build does everything at once. Here (`TorchOnGpu`) an operation on tensors in device memory returns before
it is done: a kernel that its stream runs in turn. A result that nobody waited for is NaN, and so is what was freed.

    gpu = TorchOnGpu(simulated())
    with gpu.active():
        x = gpu.to_device(torch.ones(3))   # or x.cuda(), x.to("cuda"), torch.ones(3, device="cuda")
        y = x + x                          # enqueued
        y.tolist()                         # waits for the stream

What is as on a GPU:

- ``x.device``, ``x.is_cuda``, ``device=`` of what makes tensors, and errors where host and device are mixed.
- Views are made at once, and so is what only concerns the host: version counters, autograd's graph, backward's order.
- `torch.autocast` casts operands of the operations that it casts on the CPU.
- A tensor of the host is read when a kernel is enqueued, as pageable memory is. Whoever needs numbers (`item`,
  `tolist`, `torch.equal`, ``x.cpu()``) waits for the stream, as do operations whose result's shape depends on numbers.
- Kernels keep no tensor alive. What torch frees is overwritten by NaN, in the order of the stream for which it was
  allocated, and handed out again to the next who asks for as much on this stream, before the stream has come so far:
  whoever uses it on another stream has to keep it, as with torch's caching allocator.

What is not: code of torch in C++, and inside its Python functions, that asks for a tensor's device is told that it is
the CPU. Sparse tensors, and random numbers in place, wait for the stream and are done at once. The heap does not grow
smaller.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import hvdlite.torch.device
from cuda_heap import heap_of
from cuda_lab import Cuda, SimulatedGpus
from torch_operations import alias_of, as_meta, is_tensor, is_view, leaves_of, mapped, tensors_of, written

_aten = torch.ops.aten
_TAKE_HOST_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# torch itself makes arguments of these, on the device where it believes that it is.
_MOVE_ARGUMENTS = {
    "aten::_embedding_bag",
    "aten::_embedding_bag_backward",
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::_sparse_coo_tensor_unsafe",
}


class TorchOnGpu(SimulatedGpus):
    """What torch does on the GPU of ``cuda``; takes the place of `hvdlite.torch.device.gpus`.

    Args:
        seed: of which kernels are late, and how much.
        everywhere: make tensors on the GPU where nothing else is said, as by `torch.set_default_device`.
    """

    def __init__(self, cuda: Cuda, *, seed: int = 0, late: float = 0.05, everywhere: bool = False) -> None:
        self._local = threading.local()
        super().__init__(cuda)
        self.default = self.stream
        self.everywhere = everywhere
        self.heap = heap_of(cuda)
        self._late = late
        self._random = random.Random(seed)
        self._failures: list[BaseException] = []

    @contextmanager
    def in_hvdlite(self) -> Iterator[TorchOnGpu]:
        """`active`, and hvdlite takes this for its GPU."""
        before, hvdlite.torch.device.gpus = hvdlite.torch.device.gpus, self
        try:
            with self.active():
                yield self
        finally:
            hvdlite.torch.device.gpus = before

    # Streams.

    @property  # type: ignore[override]
    def stream(self) -> ctypes.c_void_p:
        """The current one of this thread."""
        return getattr(self._local, "stream", None) or self.default

    @stream.setter
    def stream(self, stream: ctypes.c_void_p) -> None:
        self._local.stream = stream

    @contextmanager
    def on(self, stream: ctypes.c_void_p) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def synchronize(self) -> None:
        """Wait for the current stream."""
        with self.cuda.current():
            self.cuda.synchronize(self.stream)
        if self._failures:
            raise self._failures.pop(0)

    def hold(self, seconds: float) -> None:
        """What is enqueued next on the current stream comes so much later."""
        self.cuda.launch(self.stream, lambda: time.sleep(seconds))

    def settle(self) -> None:
        """Wait for the current stream, whatever it has done."""
        self.cuda.synchronize(self.stream)

    def wait_stream(self, other: ctypes.c_void_p) -> None:
        """What is enqueued on the current stream comes after what ``other`` has been given."""
        with self.cuda.current():
            event = self.cuda.event()
            self.cuda.record(event, other)
            self.cuda.wait(self.stream, event)

    @contextmanager
    def active(self) -> Iterator[None]:
        """On the thread that enters it, torch works like this."""
        with self.cuda.current(), _Functions(self), _Operations(self), ExitStack() as patches:
            patches.enter_context(_patched(torch.Tensor, "_reduce_ex_internal", self._pickle))
            patches.enter_context(_patched(torch.autograd, "_engine_run_backward", self._run_backward))
            if hasattr(torch, "get_autocast_dtype"):  # torch 2.4
                for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
                    patches.enter_context(_patched(torch, name, _of_cpu))
            yield
        self.synchronize()

    def _pickle(self, plain: Callable[..., Any], tensor: torch.Tensor, protocol: int) -> Any:
        """What was on the device will be there again."""
        if not self.has(tensor):
            return plain(tensor, protocol)
        return _unpickled, (self.to_host(tensor.detach()), tensor.requires_grad)

    def _run_backward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """With our mode for what is called there, such as hooks; torch calls backward() without."""
        with _Functions(self):
            return plain(*args, **kwargs)

    # As hvdlite asks.

    def ordinal_of(self, tensor: torch.Tensor) -> int | None:
        return self.cuda.device if self.has(tensor) else None

    def streaming(self, ordinal: int) -> Callable[[], AbstractContextManager[object]]:
        stream = self.stream

        def context() -> AbstractContextManager[object]:
            stack = ExitStack()
            for part in (self.cuda.current(), _Operations(self), self.on(stream)):
                stack.enter_context(part)
            return stack

        return context

    def new_empty(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return self.empty(shape, tensor.dtype) if self.has(tensor) else tensor.new_empty(shape)

    # Tensors, here and there.

    def has(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            if tensor.device.type != "cpu":
                return False
            if tensor.layout is torch.sparse_coo:
                with self._plain():
                    tensor = tensor._values()
            return self.cuda.has(tensor.untyped_storage().data_ptr())

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """On the device, NaN."""
        with self._plain():
            like = torch.empty(shape, dtype=dtype, device="meta")
            if strides is not None:
                like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            with self.cuda.current():
                memory = self.heap.take(like.untyped_storage().nbytes(), self.stream)
            storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, 0, like.shape, like.stride())

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the host, as it is now."""
        return self._moved(tensor, self._upload)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the device, once the stream has come so far."""
        return self._moved(tensor, self._download)

    def _moved(self, tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return move(tensor)
        back = self._download if move == self._upload else self._upload
        moved: torch.Tensor = _Move.apply(tensor, move, back)  # type: ignore[no-untyped-call]
        return moved

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._plain():
            if tensor.layout is torch.sparse_coo:
                return self._sparse(tensor, self._upload)
            source = tensor.detach().clone()
            target = self.empty(tuple(source.shape), source.dtype, source.stride())
            alias = alias_of(target)
            self.launch(lambda: alias.copy_(source))
            return target

    def _download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        with self._plain():
            if tensor.layout is torch.sparse_coo:
                return self._sparse(tensor, self._download)
            return alias_of(tensor).clone()

    def _sparse(self, tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            move(tensor._indices()),
            move(tensor._values()),
            tensor.shape,
            is_coalesced=tensor.is_coalesced(),
            check_invariants=False,
        )

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """Within, this thread's torch does what it would without us."""
        before = self.is_plain
        self._local.is_plain = True
        try:
            with torch._C.DisableTorchFunction():  # else `_Functions` is called, and sees that there is nothing to do
                yield
        finally:
            self._local.is_plain = before

    @property
    def is_plain(self) -> bool:
        return getattr(self._local, "is_plain", False)

    # Operations.

    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueue it; some come late."""
        delay_s = self._random.uniform(0, 3e-3) if self._random.random() < self._late else 0.0

        def run() -> None:
            try:
                kernel()
            except BaseException as error:
                self._failures.append(error)

        with self.cuda.current():
            self.cuda.launch(self.stream, run, delay_s=delay_s)

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``operation``, of which at least one tensor is on the device."""
        if is_view(operation):
            return operation(*args, **kwargs)
        if operation is _aten.copy_.default and all(x.layout is torch.strided for x in tensors_of(args)):
            return self._copy(*args)
        if operation._schema.name in _MOVE_ARGUMENTS:
            args = self._here(args)
        self._check_devices(operation, args, kwargs)
        planned = None if self._is_done_at_once(operation, args, kwargs) else self._planned(operation, args, kwargs)
        if planned is None:
            self.synchronize()
            return self._here(operation(*args, **kwargs))
        targets = [alias_of(made) for made in tensors_of(planned)]
        aliased_args, aliased_kwargs = mapped(self._argument, (args, kwargs))

        def kernel() -> None:
            made = operation(*aliased_args, **aliased_kwargs)
            if targets:
                for target, result in zip(targets, tensors_of(made), strict=True):
                    if result.numel():  # on the CPU, batch_norm in eval() saves nothing for backward
                        target.copy_(result)

        self.launch(kernel)
        return written(operation._schema, args, kwargs) if operation._schema.is_mutable else planned

    def _copy(self, target: torch.Tensor, source: torch.Tensor, _: bool = False) -> torch.Tensor:
        alias, other = self._argument(target), self._argument(source)
        if self.has(target):
            self.launch(lambda: alias.copy_(other))
        else:
            self.synchronize()
            target.copy_(other)
        return target

    def _argument(self, value: Any) -> Any:
        """What a kernel gets for it."""
        if not is_tensor(value):
            return value
        return alias_of(value) if self.has(value) else value.detach().clone()

    def _check_devices(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = operation._schema.name
        for value in tensors_of((args, kwargs)):
            if not self.has(value) and value.dim() and name not in _TAKE_HOST_INDICES:
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")

    def _is_done_at_once(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the host waits: for numbers or the shape of the result; or draws random numbers, of one generator."""
        schema = operation._schema
        return (
            not {torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}.isdisjoint(operation.tags)
            or schema.name in _MOVE_ARGUMENTS
            or any(value.layout is not torch.strided for value in tensors_of((args, kwargs)))
            or (not schema.is_mutable and not any("Tensor" in str(made.type) for made in schema.returns))
        )

    def _planned(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Places for what is new of the result, as the operation would return them; None: the host cannot tell yet."""
        schema = operation._schema
        if schema.is_mutable:
            return () if all(made.alias_info is not None for made in schema.returns) else None
        meta_args, meta_kwargs = mapped(as_meta, (args, {k: v for k, v in kwargs.items() if k != "device"}))
        try:
            made = operation(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            return None
        if not all(value is None or is_tensor(value) for value in leaves_of(made)):
            return None
        return mapped(lambda x: x if x is None else self.empty(tuple(x.shape), x.dtype, x.stride()), made)

    def _here(self, made: Any) -> Any:
        """The result of what was done at once, on the device."""
        return mapped(lambda x: self._upload(x) if is_tensor(x) and not self.has(x) else x, made)


class _Operations(TorchDispatchMode):
    """Below autograd: every operation."""

    def __init__(self, gpu: TorchOnGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):  # a DTensor, which comes to its parts
            return NotImplemented
        gpu, kwargs = self._gpu, kwargs or {}
        to_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
        if gpu.is_plain or to_meta or not any(gpu.has(value) for value in tensors_of((args, kwargs))):
            return func(*args, **kwargs)
        with gpu._plain():
            return gpu.run(func, args, kwargs)


class _Functions(TorchFunctionMode):
    """What Python says and asks about devices, above autograd."""

    def __init__(self, gpu: TorchOnGpu) -> None:
        super().__init__()
        self._gpu = gpu
        tensor = torch.Tensor
        self._answers: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda x, *_: torch.device("cuda", gpu.cuda.device),
            tensor.is_cpu.__get__: lambda x, *_: False,
            tensor.is_cuda.__get__: lambda x, *_: True,
            tensor.get_device: lambda x: gpu.cuda.device,
            tensor.tolist: lambda x: gpu.to_host(x.detach()).tolist(),
            tensor.numpy: _refuse_numpy,
            tensor.__array__: _refuse_numpy,
            tensor.__repr__: lambda x, **_: f"{gpu.to_host(x.detach())!r} on cuda:{gpu.cuda.device}",
            tensor.__deepcopy__: _deepcopy,
        }
        self._moves = {tensor.cpu: "cpu", tensor.cuda: "cuda"}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        if gpu.is_plain:
            return func(*args, **kwargs)
        if func in self._moves:
            return self._to(args[0], self._moves[func])
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func in self._answers and gpu.has(args[0]):
            return self._answers[func](*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            is_made = gpu.everywhere and func in _device_constructors()
            return self._put(func(*args, **kwargs), func, kwargs) if is_made else func(*args, **kwargs)
        kind = torch.device(device).type
        if kind == "cuda":
            kwargs["device"] = "cpu"
            return self._put(func(*args, **kwargs), func, kwargs)
        if kind == "cpu" and any(gpu.has(value) for value in tensors_of(args)):
            del kwargs["device"]
            return self._to(func(*args, **kwargs), "cpu")
        return func(*args, **kwargs)

    def _put(self, made: torch.Tensor, func: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        gpu = self._gpu
        if gpu.has(made):
            return made
        if func.__name__.startswith("empty"):
            put = gpu.empty(tuple(made.shape), made.dtype, made.stride())
        else:
            put = gpu._upload(made)
        return put.requires_grad_(bool(kwargs.get("requires_grad")) or made.requires_grad)

    def _to(self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        gpu = self._gpu
        other = kwargs.pop("other", args[0] if args else None)
        if isinstance(other, torch.Tensor):
            wanted, dtype, memory_format = "cuda" if gpu.has(other) else "cpu", other.dtype, None
        else:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
            wanted = None if device is None else device.type
        moved = tensor
        if wanted == "cuda" and not gpu.has(tensor):
            moved = gpu.to_device(tensor)
        elif wanted == "cpu" and gpu.has(tensor):
            moved = gpu.to_host(tensor)
        if memory_format is None:
            memory_format = torch.preserve_format
        return torch.Tensor.to(
            moved, dtype=dtype or moved.dtype, copy=copy and moved is tensor, memory_format=memory_format
        )


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, move: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        moved: torch.Tensor = move(tensor)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


@contextmanager
def _patched(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """``function`` in place of a function of torch, which is its first argument."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(plain, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _of_cpu(plain: Callable[..., Any], kind: str = "cuda", *args: Any, **kwargs: Any) -> Any:
    """What torch answers for a kind of device, of which it has the CPU only."""
    return plain("cpu" if kind == "cuda" else kind, *args, **kwargs)


def _refuse_numpy(*_: Any, **__: Any) -> None:
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")


def _unpickled(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    gpu = hvdlite.torch.device.gpus
    assert isinstance(gpu, TorchOnGpu), "pickled on a GPU"
    return gpu.to_device(tensor).requires_grad_(requires_grad)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = _deepcopy(tensor.grad, memo)
        memo[id(tensor)] = copy
    return memo[id(tensor)]  # type: ignore[no-any-return]
