# SPDX-License-Identifier: Apache-2.0
"""Kernels of a step of GPST and RNNG with `--torch-compile`, counted without a GPU.

    python -m tests.helpers.compiled_launches [CASE ...]    # needs the package triton

Inductor makes CUDA code of every function that is compiled, for an H100 and real widths. Its kernels and products are
counted, not run. The pretend GPU counts how often each function is called, and all other launches, in a step as in
`tests.helpers.launches`. Shapes are fixed here; in training, rows vary.
"""

import contextlib
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo import device_interface
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, decomposition, graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._triton import has_triton
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import hf_synlm
from hf_synlm.core import compiled_levels
from hf_synlm.models.gpst import inside_outside
from hf_synlm.models.gpst.composition import GPSTParserLayer
from hf_synlm.models.rnng import forest_lstm
from tests.helpers import launches
from tests.helpers.pretend_gpu import PretendGPU

H100 = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, clock_rate=1, gcnArchName="",
)  # fmt: skip
LAYERS = (GPT2Block, GPSTParserLayer)


class FakeCUDA(device_interface.CudaInterface):
    """What inductor asks a GPU."""

    class Worker(device_interface.CudaInterface.Worker):
        """The same, asked by a process that compiles."""

        get_device_properties = staticmethod(lambda device=None: H100)
        current_device = staticmethod(lambda: 0)

    get_device_properties = staticmethod(lambda device=None: H100)
    current_device = staticmethod(lambda: 0)
    is_available = staticmethod(lambda: True)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_triton_capable = staticmethod(lambda device=None: True)


class _Generated(Exception):  # the code is all that is needed
    pass


def kernels(function: Callable, *args: Any) -> int:
    """Kernels and products of the CUDA code that inductor makes of a function."""
    flat, spec = tree_flatten(args)
    places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = flat.copy()
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        outputs = tree_flatten(function(*tree_unflatten(values, spec)))[0]
        return [output for output in outputs if isinstance(output, torch.Tensor)]

    def fakes(device: str) -> list[torch.Tensor]:
        shapes = [(flat[place].shape, flat[place].stride(), flat[place].dtype) for place in places]
        with FakeTensorMode(allow_non_fake_inputs=True):
            return [torch.empty_strided(*shape, dtype=dtype, device=device) for *shape, dtype in shapes]

    with mock.patch("torch.compiler.is_compiling", return_value=True):
        traced = make_fx(of_tensors, decomposition_table=decomposition.select_decomp_table())(*fakes("cpu"))
    for node in traced.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
        node.meta.clear()
    traced.recompile()
    codes = []

    def generate(lowering: Any, *args: Any) -> None:
        codes.append(codegen(lowering, *args)[0])
        raise _Generated

    codegen = graph.GraphLowering.codegen
    with mock.patch.object(graph.GraphLowering, "codegen", generate), torch.no_grad():
        try:
            compile_fx.compile_fx_inner(traced, fakes("cuda:0"))
        except Exception:  # inductor wraps what stops it
            if not codes:
                raise
    body = getattr(codes[0], "value", codes[0]).split("def call(")[1]
    return len(re.findall(r"triton_\w+\.run\(|extern_kernels\.\w+\(|torch\.ops\.aten\.[\w.]+\(", body))


def _gpst(**fields: float) -> tuple[Any, launches.Inputs]:
    config = hf_synlm.GPSTConfig.from_preset("gpst-small", num_type_layers=1, num_token_layers=1, **fields)
    model, ids = hf_synlm.GPSTForCausalLM(config), torch.randint(1000, (1, 128))
    base = model.base_model
    base.composition.gradient_checkpointing = base.decomposition.gradient_checkpointing = True  # as on a GPU
    return model, {"input_ids": ids, "labels": ids}


_KEPT = dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0)
_ALL_KEPT = _KEPT | dict.fromkeys(("composition_dropout", "composition_attention_dropout"), 0.0)
_GPST, _TREES = launches.CASES["gpst-train 8 x 1024"], (512, range(16, 23))
# A model of real widths and few layers, whose functions are compiled, and the step in which they are called.
CASES: dict[str, tuple[Callable[[], tuple[Any, launches.Inputs]], launches.Case]] = {
    "gpst-train 8 x 1024": (lambda: _gpst(**_KEPT), _GPST),
    "gpst-train 8 x 1024, nothing dropped in the chart": (lambda: _gpst(**_ALL_KEPT), _GPST),
    "rnng-train 512 sentences": (
        lambda: launches.rnng(*_TREES, embedding_size=256, hidden_size=256),
        launches.Case(lambda: launches.rnng(*_TREES), "train", 0, 0),
    ),
}


@contextlib.contextmanager
def levels_call(call: Callable) -> Iterator[None]:
    """Let `call` (name, function, inputs) answer the calls of functions of levels."""

    def answer(options: Any, function: Callable, *inputs: Any, fixed: tuple = ()) -> Any:
        indices = [x for x in tree_flatten(inputs)[0] if isinstance(x, torch.Tensor) and x.dtype == torch.long]
        return call(function.__name__ + ("" if indices else ", in order"), function, (*fixed, *inputs))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compiled_levels.LevelModule, "compile_options", {}))
        for module in (inside_outside, forest_lstm):
            stack.enter_context(mock.patch.object(module, "call_level", answer))
        yield


def count_parts(model: Any, inputs: launches.Inputs) -> Counter[str]:
    """Kernels of each function of a level, and of forward and backward of a layer of each kind."""
    calls: dict[str, tuple[int, Callable, tuple]] = {}
    graphs: list[tuple[str, Callable, list[torch.Tensor]]] = []

    def keep_largest(name: str, function: Callable, inputs: tuple) -> Any:
        tensors = [x for x in tree_flatten(inputs)[0] if isinstance(x, torch.Tensor)]
        indices = [x for x in tensors if x.dtype == torch.long]
        size = sum(x.numel() for x in indices or tensors)
        if (not indices or indices[0].shape[-1] > 1) and size > calls.get(name, (0,))[0]:
            calls[name] = size, function, inputs
        return function(*inputs)

    def compile_layer(layer: torch.nn.Module) -> None:
        def keep_graph(traced: Any, inputs: list[torch.Tensor]) -> Callable:
            graphs.append((type(layer).__name__, traced.forward, [torch.zeros(x.shape, dtype=x.dtype) for x in inputs]))
            return make_boxed_func(traced.forward)

        backend = aot_autograd(fw_compiler=keep_graph, partition_fn=min_cut_rematerialization_partition)
        layer.compile(backend=backend, dynamic=False)

    for kind in LAYERS:
        for layer in [module for module in model.modules() if isinstance(module, kind)][:1]:
            compile_layer(layer)
    with levels_call(keep_largest):
        model.train()(**inputs).loss.backward()
    found = Counter({name: kernels(function, *inputs) for name, (_, function, inputs) in calls.items()})
    for name, function, tensors in graphs:
        found[name] += kernels(function, *tensors)
    return found


def count_calls(gpu: PretendGPU, case: launches.Case) -> tuple[Counter[str], int]:
    """How often each function of a level and each kind of layer is called in a step, and all other launches."""
    calls: Counter[str] = Counter()

    def not_counted(name: str, function: Callable, inputs: tuple) -> Any:
        before = gpu.kernels.copy()
        outputs = function(*inputs)
        gpu.kernels = before
        calls[name] += 1
        return outputs

    def nothing(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[type(layer).__name__] += 1
        return hidden

    with contextlib.ExitStack() as stack:
        for kind in LAYERS:
            stack.enter_context(mock.patch.object(kind, "forward", nothing))
        stack.enter_context(levels_call(not_counted))
        return calls, launches.count(gpu, case)[0]


def main() -> None:
    """Print kernels of every part, and of the step."""
    names, gpu = sys.argv[1:] or list(CASES), PretendGPU()
    with gpu:
        steps = [count_calls(gpu, CASES[name][1]) for name in names]
    answers = {"get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0, "get_current_stream": 0}
    driver.set_active(mock.Mock(**{f"{name}.return_value": answer for name, answer in answers.items()}))
    device_interface.get_registered_device_interfaces()  # or it would register its own afterwards
    for device in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(device, FakeCUDA)
    has_triton.cache_clear()  # imports have asked
    cuda = {"get_device_properties": lambda device=None: H100, "current_device": lambda: 0, "device_count": lambda: 1}
    cuda |= {"get_device_capability": lambda device=None: (9, 0), "synchronize": lambda device=None: None}
    for name, (calls, others) in zip(names, steps, strict=True):
        torch.manual_seed(0)
        with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(torch.version, "cuda", "13.0"):
            parts = count_parts(*CASES[name][0]())
        print(name)
        for part, number in parts.items():
            print(f"    {part}: {number} kernels, called {calls[part]} times")
        compiled = sum(number * calls[part] for part, number in parts.items())
        print(f"    not compiled: {others}; all: {others + compiled}", flush=True)


if __name__ == "__main__":
    main()
