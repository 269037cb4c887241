# SPDX-License-Identifier: Apache-2.0
"""Kernels of a step of GPST with `--torch-compile`, counted without a GPU.

    python -m tests.helpers.compiled_launches     # needs the package triton

Inductor makes CUDA code of every function that is compiled, for an H100 and the widths of gpst-small. Its kernels and
products are counted, not run. The pretend GPU counts how often each function is called, and all other launches, in the
step of 8 x 1024 tokens of `tests.helpers.launches`. Shapes are fixed here, and nothing is dropped; in training, rows
vary, and with dropout a level has 22 kernels more.
"""

import contextlib
import re
import types
from collections import Counter
from collections.abc import Callable
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

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.models.gpst import inside_outside
from hf_synlm.models.gpst.composition import GPSTParserLayer
from tests.helpers.launches import CASES, count
from tests.helpers.pretend_gpu import PretendGPU

H100 = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, clock_rate=1, gcnArchName="",
)  # fmt: skip
LAYERS = {"GPT-2": 12, "parser": 4}


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


def count_parts() -> dict[str, int]:
    """Kernels of each function of a level, and of forward and backward of a layer of GPT-2 and one of the parser."""
    calls: dict[str, tuple[int, Callable, tuple]] = {}
    graphs: list[tuple[str, Callable, list[torch.Tensor]]] = []

    def keep_largest(run: Any, function: Callable, *inputs: Any, fixed: tuple = ()) -> Any:
        indices = [x for x in tree_flatten(inputs)[0] if isinstance(x, torch.Tensor) and x.dtype == torch.long]
        size = sum(index.numel() for index in indices)
        if indices[0].shape[-1] > 1 and size > calls.get(function.__name__, (0,))[0]:
            calls[function.__name__] = size, function, fixed + inputs
        return function(*fixed, *inputs)

    def compile_layer(name: str, layer: torch.nn.Module) -> None:
        def keep_graph(traced: Any, inputs: list[torch.Tensor]) -> Callable:
            graphs.append((name, traced.forward, [torch.zeros(x.shape, dtype=x.dtype) for x in inputs]))
            return make_boxed_func(traced.forward)

        backend = aot_autograd(fw_compiler=keep_graph, partition_fn=min_cut_rematerialization_partition)
        layer.compile(backend=backend, dynamic=False)

    rates = "attention_dropout residual_dropout composition_dropout composition_attention_dropout".split()
    fields = {"num_type_layers": 1, "num_token_layers": 1, **dict.fromkeys(rates, 0.0)}
    model = GPSTForCausalLM(GPSTConfig.from_preset("gpst-small", **fields)).train()
    base = model.base_model
    base.composition.gradient_checkpointing = base.decomposition.gradient_checkpointing = True  # as on a GPU
    compile_layer("GPT-2", base.type_layers.h[0])
    compile_layer("parser", base.parser.layers[0])
    ids = torch.randint(1000, (1, 128))
    with mock.patch.object(inside_outside._Run, "call", keep_largest):
        model(input_ids=ids, labels=ids).loss.backward()
    found = {name: kernels(function, *inputs) for name, (_, function, inputs) in calls.items()}
    parts = dict.fromkeys(LAYERS, 0)
    for name, function, inputs in graphs:
        parts[name] += kernels(function, *inputs)
    return found | parts


def main() -> None:
    """Print kernels of every part, and of the step."""
    calls, gpu = Counter(LAYERS), PretendGPU()

    def not_counted(run: Any, function: Callable, *inputs: Any, fixed: tuple = ()) -> Any:
        before = gpu.kernels.copy()
        outputs = function(*fixed, *inputs)
        gpu.kernels, calls[function.__name__] = before, calls[function.__name__] + 1
        return outputs

    def nothing(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden

    patches = [(inside_outside._Run, "call", not_counted), (GPT2Block, "forward", nothing)]
    with contextlib.ExitStack() as stack:
        for patch in [*patches, (GPSTParserLayer, "forward", nothing)]:
            stack.enter_context(mock.patch.object(*patch))
        with gpu:
            others, _ = count(gpu, CASES["gpst-train 8 x 1024"])
    answers = {"get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0, "get_current_stream": 0}
    driver.set_active(mock.Mock(**{f"{name}.return_value": answer for name, answer in answers.items()}))
    device_interface.get_registered_device_interfaces()  # or it would register its own afterwards
    for device in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(device, FakeCUDA)
    has_triton.cache_clear()  # imports have asked
    cuda = {"get_device_properties": lambda device=None: H100, "current_device": lambda: 0, "device_count": lambda: 1}
    cuda |= {"get_device_capability": lambda device=None: (9, 0), "synchronize": lambda device=None: None}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(torch.version, "cuda", "13.0"):
        parts = count_parts()
    for name, number in parts.items():
        print(f"{name}: {number} kernels, called {calls[name]} times")
    print(f"not compiled: {others}; all: {others + sum(number * calls[name] for name, number in parts.items())}")


if __name__ == "__main__":
    main()
