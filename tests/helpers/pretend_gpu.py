"""A pretend GPU: a torch device whose tensors hold values of the CPU, for tests on machines without a GPU.

It finds what a CPU hides: an operation that mixes devices raises, so does float64 (MPS has none) and what is not
deterministic when that is asked for; autocast casts by CUDA's lists; LSTMs run in float16 under autocast as cuDNN's do;
kernels, copies to the device and waits of the host are counted, the latter by source line.
It runs real kernels of the CPU one by one, so values are exact, and times mean nothing.

Make one per process with `PretendGPU()`: the device is registered for the whole process and cannot be taken back.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"

# Operations whose result's shape or value the host must know.
WAITING = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
    + ("equal", "is_nonzero")
)
# Operations that launch nothing, beside views.
FREE = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh")
    + ("_unsafe_view", "_reshape_alias", "is_pinned", "is_same_size", "resize_", "_local_scalar_dense")
)
# What raises on CUDA under `torch.use_deterministic_algorithms(True)` for floats (torch's documentation of it).
NOT_DETERMINISTIC = ("cumsum", "cumsum_", "histc", "kthvalue", "median", "put_")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
PACKING = ("_pack_padded_sequence", "_pad_packed_sequence", "_pack_padded_sequence_backward")

# CUDA's autocast lists (docs "Autocast Op Reference"), as far as models use them.
TO_HALF = "addmm addmv mm mv bmm baddbmm addbmm matmul linear scaled_dot_product_attention conv1d".split()
TO_FLOAT = (
    "exp log log1p log2 pow reciprocal rsqrt softplus layer_norm native_layer_norm logsumexp nll_loss nll_loss_nd "
    "kl_div mse_loss binary_cross_entropy_with_logits huber_loss smooth_l1_loss prod softmax log_softmax cumprod "
    "cumsum sum norm cosine_similarity dist"
).split()
TO_WIDEST = "addcdiv addcmul index_put scatter_add cat stack dot".split()


class PretendTensor(torch.Tensor):
    """A tensor on the pretend GPU; `values` is the CPU tensor that it stands for."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> PretendTensor:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **layout, device=torch.device(NAME, 0))

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendGPU.current.run(func, args, kwargs or {})


class PretendGPU(TorchDispatchMode):
    """The device: registers itself, runs operations, and counts kernels, waits and copies to the device.

    Attributes:
        kernels: operations that would launch a kernel, by name.
        waits: what makes the host wait for the device, by kind and source line.
        copies: blocking copies from host memory to the device, by source line.
    """

    current: PretendGPU
    device = NAME
    tolerance = 1e-6

    def __init__(self) -> None:
        super().__init__()
        PretendGPU.current = self
        self.reset()
        _setup_privateuseone_for_python_backend(NAME, _Backend())
        _register_autocast()
        torch.tensor = self._tensor_from_host(torch.tensor)
        torch.Tensor.tolist = self._waiting_tolist(torch.Tensor.tolist)
        torch.Tensor.__setitem__ = self._waiting_setitem(torch.Tensor.__setitem__)
        torch.lstm = torch._VF.lstm = self._cudnn_lstm(torch.lstm)

    def reset(self) -> None:
        """Forget what was counted."""
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def move(self, thing: Any) -> Any:
        """Move a tensor, or a module in place (tied weights stay tied), to the device."""
        if not isinstance(thing, torch.nn.Module):
            return thing if isinstance(thing, PretendTensor) else PretendTensor(thing.detach().clone())
        moved: dict[int, torch.nn.Parameter] = {}
        for module in thing.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    new = torch.nn.Parameter(self.move(weight), weight.requires_grad)
                    module._parameters[name] = moved.setdefault(id(weight), new)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.move(buffer)
        thing._moved_from = moved  # type: ignore[assignment]  # keeps the ids of the old weights taken
        return thing

    @contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """Raise if the host waits for the device inside."""
        self.reset()
        yield
        if self.waits:
            raise AssertionError(f"the host waits for the device: {dict(self.waits)}")

    # ------------------------------------------------------------------------------------------------ operations
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one ATen operation on the CPU's values and wrap what lies on the device."""
        name = func._schema.name.split("::")[1]
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
        to = kwargs.get("device")
        here = torch.device(to).type == NAME if to is not None else bool(inputs)
        if name in ("_to_copy", "copy_"):
            return self._copy(name, func, args, kwargs, here)
        if inputs and len(inputs) < len(leaves) and name not in PACKING:
            self._check_devices(name, func, args, leaves)
        if here:
            if (
                name in NOT_DETERMINISTIC
                and torch.are_deterministic_algorithms_enabled()
                and args[0].is_floating_point()
            ):
                raise RuntimeError(f"{func} has no deterministic implementation on CUDA, at {_site()}")
            self._count(name, func, args, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if to is not None and here:
            kwargs["device"] = "cpu"
        args, kwargs = tree_map(_values, (args, kwargs))
        result = func(*args, **kwargs)
        if not here:
            return result
        if name == "_pack_padded_sequence":  # lengths stay on the host
            return PretendTensor(result[0]), result[1]

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            written = [tensor for tensor in inputs if tensor.values is value]  # in place, or `out`
            return written[0] if written else PretendTensor(value)

        return tree_map(wrapped, result)

    def _copy(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], here: bool) -> Any:
        source = args[0] if name == "_to_copy" else args[1]
        here = here if name == "_to_copy" else isinstance(args[0], PretendTensor)
        if isinstance(source, PretendTensor) and here:
            self.kernels[name] += 1
        elif isinstance(source, PretendTensor):
            self.waits[f"copy to the host {_site()}"] += 1
        elif here and not source.is_pinned():
            self.copies[_site()] += 1
        if name == "copy_":
            _values(args[0]).copy_(_values(source))
            return args[0]
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        if here and kwargs.get("dtype") == torch.float64:
            raise RuntimeError(f"float64 on the device, at {_site()}: MPS has none, so convert on the host")
        copy = func(_values(source), **kwargs)
        return PretendTensor(copy) if here else copy

    def _check_devices(self, name: str, func: Any, args: Any, leaves: list[torch.Tensor]) -> None:
        """Allow what CUDA allows: numbers of the host, and indices of the host into a tensor of the device."""
        strangers = [leaf for leaf in leaves if leaf.dim() and not isinstance(leaf, PretendTensor)]
        if not strangers:
            return
        if not (name in INDEXING and isinstance(args[0], PretendTensor)):
            shapes = [tuple(tensor.shape) for tensor in strangers]
            raise RuntimeError(f"{func} mixes devices: tensors {shapes} are on the CPU, at {_site()}")
        self.copies[_site()] += len(strangers)

    def _count(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waits[f"{name} {_site()}"] += 1
        elif name in INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.waits[f"boolean index {_site()}"] += 1
        if not (func.is_view or name in FREE):
            self.kernels[name] += 1

    # ------------------------------------------------------------------------- functions that bypass the dispatcher
    def _tensor_from_host(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != NAME:
                return make(data, *args, device=device, **kwargs)
            self.waits[f"torch.tensor {_site()}"] += 1
            return PretendTensor(make(data, *args, **kwargs))

        return tensor

    def _waiting_tolist(self, tolist: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, PretendTensor):
                self.waits[f"tolist {_site()}"] += 1
            return tolist(_values(tensor))

        return waiting

    def _waiting_setitem(self, setitem: Callable[..., Any]) -> Callable[..., Any]:
        """On CUDA, a number written to places that a tensor names is made on the host and copied."""

        def waiting(tensor: torch.Tensor, index: Any, value: Any) -> None:
            if isinstance(tensor, PretendTensor) and not isinstance(value, torch.Tensor):
                if any(isinstance(part, torch.Tensor) for part in tree_leaves(index)):
                    self.waits[f"number of the host {_site()}"] += 1
            setitem(tensor, index, value)

        return waiting

    def _cudnn_lstm(self, lstm: Callable[..., Any]) -> Callable[..., Any]:
        def cudnn(*args: Any) -> Any:
            if not isinstance(args[0], PretendTensor):
                return lstm(*args)
            self.kernels["cudnn_lstm"] += 1
            return _CuDNN.apply(lstm, args, *[leaf for leaf in tree_leaves(args) if isinstance(leaf, PretendTensor)])

        return cudnn


class _CuDNN(torch.autograd.Function):
    """cuDNN's LSTM: float16 under autocast, whatever the type asked for (ATen's AutocastRNN.cpp)."""

    @staticmethod
    def forward(ctx: Any, lstm: Callable[..., Any], args: Any, *inputs: PretendTensor) -> Any:
        half = torch.is_autocast_enabled(NAME)
        leaves = iter([x.values.detach().to(torch.float16 if half else x.dtype).requires_grad_(True) for x in inputs])
        ctx.leaves = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, PretendTensor):
                return value
            ctx.leaves.append(next(leaves))
            return ctx.leaves[-1]

        with torch.enable_grad():
            ctx.outputs = lstm(*tree_map(leaf, args))
        ctx.types = [x.dtype for x in inputs]
        return tuple(PretendTensor(output.detach()) for output in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        PretendGPU.current.kernels["cudnn_lstm_backward"] += 1
        pairs = [(y, _values(dy).to(y.dtype)) for y, dy in zip(ctx.outputs, gradients, strict=True) if dy is not None]
        found = torch.autograd.grad([y for y, _ in pairs], ctx.leaves, [dy for _, dy in pairs], allow_unused=True)
        moved = [None if g is None else PretendTensor(g.to(t)) for g, t in zip(found, ctx.types, strict=True)]
        return None, None, *moved


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, *args: Any) -> None:
        pass

    def synchronize(self, *args: Any) -> None:
        pass


def _values(thing: Any) -> Any:
    return thing.values if isinstance(thing, PretendTensor) else thing


# torch.utils._pytree does the same for all kinds of containers, several times slower.
def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of lists, tuples and dictionaries."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([tree_map(function, part) for part in tree])
    if isinstance(tree, dict):
        return {name: tree_map(function, part) for name, part in tree.items()}
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of lists, tuples and dictionaries."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def _site() -> str:
    """File, line and function of the library's innermost frame."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if f"{os.sep}hf_synlm{os.sep}" in path or f"{os.sep}transformers{os.sep}" in path:
            return f"{os.path.basename(path)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


_LIBRARIES: list[torch.library.Library] = []


def _register_autocast() -> None:
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    _LIBRARIES.extend((fallback, casts))
    for names, rule in ((TO_HALF, _half), (TO_FLOAT, _float), (TO_WIDEST, _widest)):
        for name in names:
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                function = getattr(packet, overload)
                arguments = function._schema.arguments
                if not any(argument.alias_info is not None for argument in arguments) and "name" not in overload:
                    full = name if overload == "default" else f"{name}.{overload}"
                    casts.impl(full, _casting(function, rule))


def _casting(function: Any, rule: Callable[[list[torch.dtype]], torch.dtype | None]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def castable(value: Any) -> bool:
        return isinstance(value, PretendTensor) and value.is_floating_point() and value.dtype != torch.float64

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = rule([leaf.dtype for leaf in tree_leaves((args, kwargs)) if castable(leaf)])
            args, kwargs = tree_map(lambda x: x.to(dtype) if castable(x) else x, (args, kwargs))
            return function(*args, **kwargs)

    return call


def _half(found: list[torch.dtype]) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _float(found: list[torch.dtype]) -> torch.dtype:
    return torch.float32


def _widest(found: list[torch.dtype]) -> torch.dtype:
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype(NAME)


class CUDA:
    """A real GPU, with the methods of the pretend one that tests use."""

    device = "cuda"
    tolerance = 1e-4  # TF32 aside, sums run in another order

    def __enter__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def __exit__(self, *error: Any) -> None:
        pass

    def move(self, thing: Any) -> Any:
        """Move a tensor, or a module in place, to the device."""
        return thing.cuda()

    @contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """Raise if the host waits for the device inside."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
