"""Whole training steps of GPST: the loop against a bare step, memory by batch and context, two processes against one.

A step of the loop reads its batch from the data set, agrees on shares, runs forward and backward passes, clips, and
updates. The bare step has its batch ready and does the least that trains the same model.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from benchmarks.gpst import NO_DROPOUT, QUARTER, packed_contexts
from benchmarks.sides import Sides

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.collate import collate_contexts
from hf_synlm.training.engine.arguments import TrainingArguments
from hf_synlm.training.engine.output_folder import RESULTS_FILE
from hf_synlm.training.engine.run import Run, TrainingState, make_accelerator, make_optimizer
from hf_synlm.training.engine.samplers import StepSampler, make_loader
from hf_synlm.training.engine.steps import StopSignals, model_loss, optimizer_steps

SAMPLES = 64
MEMORY_SIZES = ((1, 256), (2, 256), (4, 256), (1, 512), (2, 512), (1, 1024))


def gpst_loop(
    overrides: dict[str, Any], batch_size: int, num_tokens: int, gradient_checkpointing: bool = False
) -> Sides:
    """Optimizer steps of the training loop against bare steps, whose batch is ready.

    Args:
        overrides: fields of the configuration that differ from the small preset.
        batch_size: contexts per step.
        num_tokens: tokens per context.
        gradient_checkpointing: recompute layer activations, on both sides.

    Returns:
        Both sides.
    """
    arguments = TrainingArguments(  # the folder is never made
        output_dir="benchmark_loop",
        per_device_train_batch_size=batch_size,
        max_train_steps=10**6,
        num_warmup_steps=0,
    )
    accelerator = make_accelerator(arguments)
    config = GPSTConfig(**overrides, **NO_DROPOUT, merge_noise=0.0)
    rows = zip(*(part.tolist() for part in packed_contexts(SAMPLES, num_tokens, config.vocab_size)), strict=True)
    contexts = [{"input_ids": ids, "sentence_ids": numbers} for ids, numbers in rows]

    def make() -> tuple[GPSTForCausalLM, torch.optim.Optimizer, Any]:
        set_seed(0)
        model = GPSTForCausalLM(config).train()
        if gradient_checkpointing:
            model.activation_checkpointing_enable()
        return (model, *make_optimizer(model, arguments))

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return collate_contexts(rows, config.pad_token_id)

    run = Run(accelerator, arguments, *accelerator.prepare(*make()), TrainingState())
    sampler = StepSampler(SAMPLES, batch_size, 0)
    loader = make_loader(accelerator, contexts, collate, arguments, sampler)
    steps = optimizer_steps(run, loader, model_loss, StopSignals())
    model, optimizer, schedule = make()
    turns = itertools.cycle([collate([contexts[k] for k in ids]) for ids in itertools.islice(sampler, 4)])

    def ours() -> Any:
        return next(steps)

    def theirs() -> torch.Tensor:
        loss = model(**next(turns)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    def check() -> None:
        for _ in range(2):
            torch.testing.assert_close(ours().losses["loss"], theirs().detach(), rtol=1e-4, atol=1e-4)

    return Sides(ours, theirs, check)


def memory_growth(measure: Callable[[Callable[[], Sides]], float]) -> str:
    """Peak memory of a step against contexts per step and tokens per context, as a table.

    Args:
        measure: peak memory of what a function builds, in MiB (`benchmark.peak_memory`).

    Returns:
        The table; quarter size, float32.
    """
    rows = ["contexts x tokens     MiB   MiB with gradient_checkpointing"]
    for batch_size, num_tokens in MEMORY_SIZES:
        plain, recomputed = (measure(partial(gpst_loop, QUARTER, batch_size, num_tokens, k)) for k in (False, True))
        rows.append(f"{batch_size:>8} x {num_tokens:<7}{plain:>8.0f}{recomputed:>34.0f}")
    return "\n".join(rows)


def process_scaling(num_steps: int) -> str:
    """Tokens per second of pretrain_gpst.py on one process and on two, with the same batch per process.

    Args:
        num_steps: optimizer steps of each run.

    Returns:
        Both, and their ratio, which would be 2 without any cost.
    """
    scripts, speeds = Path(__file__).parents[1], []
    sizes = {name: value for name, value in QUARTER.items() if not name.endswith("_id") and name != "vocab_size"}
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2):
            output_dir = Path(folder) / str(count)
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)),
                *(str(scripts / "pretrain_gpst.py"), "--config", str(scripts / "configs" / "gpst_tiny.yaml")),
                *("--output_dir", str(output_dir), "--config_overrides", json.dumps(sizes)),
                *("--validation_trees", "none", "--test_trees", "none", "--final_report", "False"),
                *("--max_train_steps", str(num_steps), "--evaluation_steps", "0", "--logging_steps", str(num_steps)),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            results = json.loads((output_dir / RESULTS_FILE).read_text(encoding="utf-8"))
            speeds.append(results["tokens_per_second"])
    return (
        f"tokens per second: {speeds[0]:.0f} on one process, {speeds[1]:.0f} on two: ratio {speeds[1] / speeds[0]:.2f}"
    )
