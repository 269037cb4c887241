# SPDX-License-Identifier: Apache-2.0
"""Parts of a run: accelerator, state, settings that a resumed run must repeat, model, optimizer and tokenizer."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ProjectConfiguration, parse_flag_from_env
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_scheduler,
)

from hf_synlm.core.backbone_adapter import linear_layers
from hf_synlm.core.configuration_base import position_limit
from hf_synlm.data.tokenizers import check_vocabulary
from hf_synlm.training.arguments.base import ModelArguments, TrainingArguments, check_overrides

WAITING_TIME = timedelta(hours=2)
OWN_TOKENIZER = "Pass the model's own tokenizer as --tokenizer-name."  # a remedy


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """Make the accelerator: devices come from `accelerate launch`, the rest from the arguments.

    Raises ValueError if the processes of the launcher do not find each other, if accelerate would silently use
    another engine than the launcher asks for, or for a precision that the device does not have.
    """
    # It is said of every save, of weights that are tied on purpose.
    logging.getLogger("accelerate.utils.other").addFilter(lambda record: "Removed shared tensor" not in record.msg)
    precision = arguments.precision
    accelerator = Accelerator(
        mixed_precision="no" if precision in ("float32", "tf32") else precision,
        # By default, the processes of torchrun do not find each other on a machine without GPUs.
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        # The main process reads treebanks and draws samples while the others wait: longer than torch's ten minutes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=WAITING_TIME)],
        # The schedule counts optimizer steps: it must not run faster with more processes.
        step_scheduler_with_optimizer=False,
        log_with=arguments.report_to if arguments.with_tracking else None,
        project_config=ProjectConfiguration(
            project_dir=arguments.output_dir, logging_dir=str(Path(arguments.output_dir) / "logs")
        ),
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world_size:
        raise ValueError(
            f"The launcher started {world_size} processes, but accelerate sees {accelerator.num_processes}. Start "
            "the script with torchrun or with `accelerate launch --multi_gpu`."
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"The launcher asks for FSDP, but accelerate falls back to {accelerator.distributed_type}: FSDP needs GPUs "
            "and more than one process. Launch with hf_synlm/training/accelerate/ddp.yaml, or on GPUs."
        )
    on_gpu = accelerator.device.type == "cuda"
    if precision == "tf32" and not on_gpu:
        raise ValueError("precision is 'tf32', which only a GPU has. Leave it out, or give 'float32' or 'bf16'.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on_gpu and precision != "float32"
    return accelerator


def precision_of(accelerator: Accelerator) -> str:
    """Precision of a run: that of autocast (bf16, fp16); without it tf32 for products in TF32, otherwise "no"."""
    tf32 = accelerator.mixed_precision == "no" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else accelerator.mixed_precision


@dataclass
class TrainingState:
    """What a checkpoint holds besides weights and optimizer, as JSON.

    Fields:
        step: optimizer steps done.
        consumed: samples (`StepSampler`) or batches (`PaddedBatchSampler`, segments of a stream) that all processes
            together have consumed.
        tokens: that all processes together have read.
        words: likewise, if `keep_at_words` counts them.
        settings: everything that decides the course of the run; a resumed run must repeat them.
        notes: evaluations, training losses, the step and metric of the best model, and the steps whose checkpoints are
            kept.
    """

    step: int = 0
    consumed: int = 0
    tokens: int = 0
    words: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """All parts of a run; model and optimizer are prepared by accelerate, the schedule has `step` and `get_last_lr`."""

    accelerator: Accelerator
    arguments: TrainingArguments
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    state: TrainingState

    def __post_init__(self) -> None:
        """Note the names of the learning rates: older checkpoints lack them, and loading would lose them."""
        self.rate_names = [group.get("name") for group in self.optimizer.param_groups]

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.arguments.output_dir)


def end_run(run: Run) -> None:
    """End trackers and process group of a run; its model is not wrapped afterwards. Every process calls.

    The wrapper of DDP must be deleted before the process group. If it held the last reference to the group, its
    destructor would wait for the group's threads while these wait for Python's lock, which it holds.
    """
    accelerator = run.accelerator
    accelerator.wait_for_everyone()
    run.model = accelerator.unwrap_model(run.model)
    accelerator.free_memory()
    accelerator.end_training()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash vocabulary, rules and special tokens (16 digits); padding and truncation of the last call do not count."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    last_call = dict.fromkeys(("padding", "truncation")) if tokenizer.is_fast else {}
    text = json.dumps([{**rules, **last_call}, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def course_settings(
    arguments: TrainingArguments, config: PreTrainedConfig, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Settings that decide the course of a run and that all programs share; folders and intervals do not."""
    names = (
        "seed max_train_steps learning_rate adam_beta1 adam_beta2 adam_epsilon adam_bias_correction weight_decay "
        "max_grad_norm lr_scheduler_type warmup_steps per_device_train_batch_size gradient_accumulation_steps "
        "early_stopping_patience"
    ).split()
    return {
        **{name: getattr(arguments, name) for name in names},
        "keep_at_words": bool(arguments.word_marks) or None,  # words are counted; None: as in runs without this option
        "config": config.to_dict(),
        "tokenizer": tokenizer_hash(tokenizer),
        "num_processes": accelerator.num_processes,
        "distributed_type": str(accelerator.distributed_type),
        "mixed_precision": precision_of(accelerator),
    }


def load_pretrained(
    model_class: type[PreTrainedModel], name: str, overrides: Any, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> PreTrainedModel:
    """Load the model that a run continues from, in float32; `options` are more of `from_pretrained`.

    `overrides` (`config_overrides`) change fields such as the weights of losses. Raises ValueError if they change the
    shape of weights, the model does not exist, has another architecture or lacks weights, or the tokenizer has more
    tokens than the model.
    """
    try:
        found, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise ValueError(f"model_name_or_path {name!r} is neither a model folder nor a model on the Hub.") from error
    wanted = model_class.config_class.model_type
    if found.get("model_type") != wanted:
        raise ValueError(
            f"model_name_or_path {name!r} holds a model of type {found.get('model_type')!r}, not {wanted!r}. Name "
            "another model, or train this model with the program and architecture of its type."
        )
    checked = check_overrides(model_class.config_class, overrides, ("vocab_size",))
    changed = {field: value for field, value in checked.items() if found.get(field) != value}
    # Fields that `from_pretrained` of a model is given would enter its generation config, too.
    config = model_class.config_class.from_pretrained(name, **changed)
    model, loading = model_class.from_pretrained(
        name,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=bool(changed),
        **options,
    )
    other = {key if isinstance(key, str) else key[0] for part in loading.values() for key in part}
    if changed and other:
        raise ValueError(
            f"config_overrides {changed} change the weights of model_name_or_path {name!r} (such as {min(other)}). "
            "Give only fields that keep the shapes, also in the file of --config."
        )
    if loading["missing_keys"]:
        raise ValueError(
            f"model_name_or_path {name!r} lacks weights. Random weights would take their place: "
            f"{', '.join(sorted(loading['missing_keys']))}. Name a complete model of type {wanted!r}."
        )
    check_vocabulary(tokenizer, model.config.vocab_size, OWN_TOKENIZER)
    return model


def new_or_pretrained(
    arguments: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    decided: dict[str, Any],
    defaults: dict[str, Any] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Make an untrained model of preset and overrides, or load the one to continue from.

    The configuration takes over the size of the tokenizer and what is `decided`, such as special tokens; overrides may
    change `defaults`. `options` are those of `load_pretrained`.
    """
    model_class = arguments.row.model_class
    if arguments.model_name_or_path is not None:
        name, overrides = arguments.model_name_or_path, arguments.config_overrides
        return load_pretrained(model_class, name, overrides, tokenizer, **options)
    decided = {"vocab_size": len(tokenizer), **decided}
    overrides = check_overrides(model_class.config_class, arguments.config_overrides, decided)
    fields = {**(defaults or {}), **decided, **overrides}
    return model_class(model_class.config_class.from_preset(arguments.model_preset or arguments.row.preset, **fields))


def check_length(config: PreTrainedConfig, length: int, what: str, remedy: str) -> None:
    """Raise ValueError if a text (`what`) of `length` tokens does not fit the positions of a model."""
    limit = position_limit(config)
    if limit is not None and length > limit:
        raise ValueError(
            f"{what} is {length} tokens, {length - limit} more than the {limit} positions of the model. {remedy}"
        )


def make_baseline(
    model_type: str, overrides: Any, tokenizer: PreTrainedTokenizerBase, context_length: int = 0
) -> PreTrainedModel:
    """Make an untrained causal language model of transformers, of a model type such as "gpt2"."""
    try:
        config_class = type(AutoConfig.for_model(model_type))
    except ValueError as error:
        raise ValueError(
            f"architecture {model_type!r} is unknown. Choose a model type of transformers, such as gpt2."
        ) from error
    if tokenizer.bos_token_id is None:
        raise ValueError("The tokenizer has no begin token, but every context begins with it. Set its bos_token.")
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    checked = check_overrides(config_class, overrides, ("vocab_size",))
    config = config_class(vocab_size=len(tokenizer), **{**ids, **checked})
    what, remedy = f"context_length {context_length} with the begin token", "Change it, or the sizes of the model."
    check_length(config, context_length + 1, what, remedy)
    return AutoModelForCausalLM.from_config(config)


def add_lora(model: Any, rank: int, name: str | None, layers: list[str] | None = None, **options: Any) -> None:
    """Add LoRA to the backbone of a model, whose Hub name is `name`; `layers` are by default all that are linear."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError(f"--lora-r is {rank}, and LoRA needs PEFT. Install it by pip install peft") from error
    model.backbone_source["name"] = name or model.backbone_source["name"]
    options = {"lora_alpha": 2 * rank, "target_modules": linear_layers(model, layers), **options}
    model.add_adapter(LoraConfig(r=rank, **options))


def set_up_layers(model: PreTrainedModel, arguments: TrainingArguments, to_compile: Sequence[nn.Module]) -> None:
    """Apply `gradient_checkpointing` and `torch_compile` to a model that is not prepared yet.

    Names of parameters do not change.
    """
    kind = model.config.model_type
    if arguments.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"{kind} cannot recompute layers. Set --gradient-checkpointing to False.")
        model.activation_checkpointing_enable()
    if arguments.torch_compile:
        if not to_compile:
            raise ValueError(
                f"--torch-compile is set, but no part of {kind} is compiled by this program. Leave --torch-compile out."
            )
        for layer in to_compile:
            layer.compile(dynamic=True)


# ---------------------------------------------------------------------------------------------- optimizer
def parameter_groups(
    model: nn.Module, learning_rate: float, module_rates: dict[str, float], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay; biases, norms and vectors are never decayed.

    `module_rates` maps a part of parameters' names, such as "parser" or "head.weight", to its learning rate; the first
    that fits counts, and names the group.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    names = {rate: module for module, rate in module_rates.items()} | {learning_rate: ""}
    unused = set(module_rates)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = next((module for module in module_rates if f".{module}." in f".{name}."), None)
        unused.discard(owner)
        rate = learning_rate if owner is None else module_rates[owner]
        groups.setdefault((rate, weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    if unused:
        raise ValueError(f"No parameter of the model belongs to a module named {sorted(unused)[0]!r}.")
    return [
        {"params": params, "lr": rate, "weight_decay": decay, "name": names[rate]}
        for (rate, decay), params in groups.items()
    ]


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW without bias correction, as `AdamW(correct_bias=False)` of transformers 4.

    w <- w - rate * (m / (sqrt(v) + epsilon) + decay * w). torch's AdamW computes this from a rate times
    c = (1 - beta1^t) / sqrt(1 - beta2^t), a decay divided by c, and an epsilon divided by sqrt(1 - beta2^t).
    `num_steps` is t on the host: torch's own t lies on the GPU where the optimizer is fused, and reading it would wait.
    """

    num_steps = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded state, and count on from its steps."""
        super().__setstate__(state)
        self.num_steps = max((int(item["step"]) for item in self.state.values()), default=0)

    # torch declares overloads: without a closure a step returns None.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step (see `torch.optim.Optimizer.step`)."""
        self.num_steps += 1
        given = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            first, second = (1 - beta**self.num_steps for beta in group["betas"])
            scale = first / math.sqrt(second)
            group["lr"] *= scale
            group["weight_decay"] /= scale
            group["eps"] /= math.sqrt(second)
        try:
            return super().step(closure)
        finally:
            for group, old in zip(self.param_groups, given, strict=True):
                group.update(old)


def make_optimizer(
    model: nn.Module,
    arguments: TrainingArguments,
    module_rates: dict[str, float] | None = None,
    fused: bool | None = None,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make AdamW with parameter groups, and its schedule: linear warm-up, then `lr_scheduler_type` to the last step.

    `fused` makes one kernel of the update of many parameters (see `torch.optim.AdamW`).
    """
    groups = parameter_groups(model, arguments.learning_rate, module_rates or {}, arguments.weight_decay)
    optimizer_class = torch.optim.AdamW if arguments.adam_bias_correction else UncorrectedAdamW
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    optimizer = optimizer_class(groups, betas=betas, eps=arguments.adam_epsilon, fused=fused)
    name = "constant_with_warmup" if arguments.lr_scheduler_type == "constant" else arguments.lr_scheduler_type
    schedule = get_scheduler(name, optimizer, arguments.warmup_steps, arguments.num_steps)
    return optimizer, schedule
