"""How every training script begins and ends: accelerator, output folder, trackers, model, export."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ProjectConfiguration, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.hub.card import PAPERS, fill_card
from hf_synlm.hub.export import export_model
from hf_synlm.training.arguments import TrainingArguments
from hf_synlm.training.checkpoints import (
    PARTIAL_SUFFIX,
    TrainingState,
    publish_folder,
    tokenizer_hash,
    write_json,
    written_whole,
)
from hf_synlm.training.output_folder import ARGUMENTS_FILE, release, without_token

WAITING_TIME = timedelta(hours=2)


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """Accelerator of a run: precision and devices come from `accelerate launch`, the rest from the arguments.

    Raises:
        ValueError: when the launcher started several processes that do not find each other, or asks for an engine that
            accelerate leaves out on this machine.
    """
    accelerator = Accelerator(
        # Without it, processes that torchrun starts on a machine without GPUs each believe to be alone.
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
            f"The launcher started {world_size} processes and accelerate sees {accelerator.num_processes}. "
            "Start the script with torchrun or with `accelerate launch --multi_gpu`."
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"The launcher asks for FSDP, and accelerate makes {accelerator.distributed_type} of it: it shards on GPUs "
            "only, with more than one process. Launch with training/accelerate/ddp.yaml, or on GPUs."
        )
    return accelerator


def start_tracking(accelerator: Accelerator, name: str, *arguments: Any) -> None:
    """Write all arguments to `output_dir/arguments.json` (without the token) and to the trackers, if there are any."""
    settings = {key: value for item in arguments for key, value in dataclasses.asdict(item).items()}
    settings = without_token(settings)
    if accelerator.is_main_process:
        write_json(Path(settings["output_dir"]) / ARGUMENTS_FILE, settings)
    if accelerator.log_with:
        simple = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in settings.items()}
        accelerator.init_trackers(name, config=simple)


@dataclass
class Run:
    """All parts of a run."""

    accelerator: Accelerator
    arguments: TrainingArguments
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    state: TrainingState

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.arguments.output_dir)


def end_run(run: Run) -> None:
    """End a run: trackers, the connection of its processes, its lock; the wrapped model cannot be used afterwards.

    The wrapper of DDP goes before the process group: were it the last to hold the group, its destructor would wait for
    the group's threads while these wait for Python's lock, which it holds.
    """
    accelerator = run.accelerator
    accelerator.wait_for_everyone()
    run.model = accelerator.unwrap_model(run.model)
    accelerator.free_memory()
    accelerator.end_training()
    release(run.output_dir)


def course_settings(
    arguments: TrainingArguments,
    config: Any,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Settings that decide the course of a run and that all programs share; folders and intervals do not.

    Args:
        arguments: of the run.
        config: of the model.
        accelerator: of the run.
        tokenizer: of the model.

    Returns:
        Settings for `loop.start_or_resume`.
    """
    names = (
        "seed max_train_steps learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm "
        "lr_scheduler_type warmup_steps per_device_train_batch_size gradient_accumulation_steps"
    ).split()
    return {
        **{name: getattr(arguments, name) for name in names},
        "config": config.to_dict(),
        "tokenizer": tokenizer_hash(tokenizer),
        "num_processes": accelerator.num_processes,
        "distributed_type": str(accelerator.distributed_type),
        "mixed_precision": accelerator.mixed_precision,
    }


def load_pretrained(
    model_class: type[PreTrainedModel],
    name: str,
    overrides: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> PreTrainedModel:
    """Load the model that a run continues from, and check it against the tokenizer.

    Args:
        model_class: of the library.
        name: folder or Hub name.
        overrides: of the configuration; there must be none.
        tokenizer: of the run.

    Returns:
        The model in float32.

    Raises:
        ValueError: for overrides, when there is no such model, when it has another architecture or lacks some of the
            weights, and when the tokenizer has ids that the model has not.
    """
    if overrides:
        raise ValueError("config_overrides cannot change the model of model_name_or_path. Leave one of them out.")
    try:
        found, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise ValueError(f"model_name_or_path {name!r} is no folder of a model and no model of the Hub.") from error
    wanted = model_class.config_class.model_type
    if found.get("model_type") != wanted:
        raise ValueError(
            f"model_name_or_path {name!r} holds a model of type {found.get('model_type')!r}, not {wanted!r}. Name "
            "another model, or train it with the script and architecture of its type."
        )
    model, loading = model_class.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    if loading["missing_keys"]:
        raise ValueError(
            f"model_name_or_path {name!r} lacks weights, and random ones would take their place: "
            f"{', '.join(sorted(loading['missing_keys']))}. Name a complete model of type {wanted!r}."
        )
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}. "
            "Pass --tokenizer_name with the model's own tokenizer."
        )
    return model


def words_fingerprint(sentences: Iterable[Sequence[str]]) -> str:
    """Short hash of the words of a text, wherever its files lie. Cost: O(characters)."""
    digest = hashlib.sha256()
    for words in sentences:
        digest.update("\0".join(words).encode() + b"\n")
    return digest.hexdigest()[:16]


def set_up_layers(model: PreTrainedModel, arguments: TrainingArguments) -> None:
    """Recompute or compile the layers of a model, as far as the arguments ask for it; before it is prepared.

    What is compiled are the Transformer layers of GPST: their shapes vary with the batch in the number of rows and
    slots only, so that two graphs serve all batches. Names of parameters do not change.

    Args:
        model: of the run.
        arguments: of the run.

    Raises:
        ValueError: for a model whose layers cannot be recomputed or compiled.
    """
    kind = model.config.model_type
    if arguments.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"gradient_checkpointing is set, but {kind} has no layers to recompute. Leave it out.")
        model.activation_checkpointing_enable()
    if arguments.torch_compile:
        if kind != "gpst":
            raise ValueError(
                f"torch_compile is set, but {kind} computes in loops whose lengths depend on the text, each in a "
                "function with its own backward pass. Leave it out."
            )
        base = model.base_model
        for layer in (*base.type_layers.h, *base.token_layers.h, *base.parser.layers):
            layer.compile(dynamic=True)


def save_tokenizer_once(
    accelerator: Accelerator, folder: Path, make: Callable[[], PreTrainedTokenizerBase], made_from: dict[str, Any]
) -> None:
    """Make a tokenizer on the main process and save it; a resumed run finds that of its first part.

    Args:
        accelerator: of the run. Every process has to call.
        folder: where the tokenizer lies afterwards; if it exists, nothing is made.
        make: makes the tokenizer.
        made_from: options and hash of the words that it depends on; written next to it.

    Raises:
        ValueError: when the one that exists was made from something else.
    """
    record = folder / "made_from.json"
    if accelerator.is_main_process and not folder.is_dir():
        tokenizer = make()
        partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save_pretrained(partial)
        (partial / record.name).write_text(json.dumps(made_from, indent=2), encoding="utf-8")
        partial.rename(folder)
    accelerator.wait_for_everyone()
    known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    changed = {name: value for name, value in made_from.items() if known.get(name) != value}
    if changed:
        raise ValueError(
            f"The tokenizer in {folder} was made with { ({name: known.get(name) for name in changed}) }, and now "
            f"{changed} is asked for. Repeat the old values, pass it as tokenizer_name, or take another output_dir."
        )


def save_final_model(run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> Path:
    """Save the model of a run to `output_dir/model`; every process has to call.

    A model of this library is exported with tokenizer, code and card, one of transformers as transformers saves it.

    Args:
        run: of this process.
        tokenizer: of the model.
        facts: for the card; the name is added.

    Returns:
        The folder.
    """
    folder = run.output_dir / "model"
    export_run(run, tokenizer, facts, folder)
    return folder


def export_run(run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], folder: Path) -> None:
    """Export the model of a run as it is now; every process has to call.

    Args:
        run: of this process.
        tokenizer: of the model.
        facts: for the card of a model of this library; the name is added.
        folder: appears when it is complete; an older one is replaced.

    Raises:
        OSError: when it cannot be written.
    """
    weights = run.accelerator.get_state_dict(run.model)
    try:
        if run.accelerator.is_main_process:
            with written_whole(folder, "The model"):
                _write_model(run, tokenizer, facts, folder, weights)
    finally:
        run.accelerator.wait_for_everyone()


def _write_model(
    run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], folder: Path, weights: dict[str, Tensor]
) -> None:
    """The part of `export_run` that the main process does."""
    plain = run.accelerator.unwrap_model(run.model)
    if isinstance(plain, FSDPModule):
        plain = _without_shards(plain)
        # Gathered weights are copies: the ones that are tied would be saved twice.
        weights = {name: value for name, value in weights.items() if name not in plain.all_tied_weights_keys}
    if plain.config.model_type in PAPERS:
        card = fill_card(
            plain.config, {"repo_id": run.arguments.hub_model_id or run.output_dir.resolve().name, **facts}
        )
        export_model(plain, tokenizer, folder, card=card, overwrite=True, state_dict=weights)
    else:
        _save_plainly(plain, tokenizer, folder, weights)


def _save_plainly(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: dict[str, Tensor]
) -> None:
    """Save a model of transformers under a temporary name, and rename it."""
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    publish_folder(partial, folder)


def _without_shards(model: PreTrainedModel) -> PreTrainedModel:
    """An empty model of the class that is to be saved: FSDP2 makes a subclass of its own of it."""
    own_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        empty = own_class(model.config)
    empty.generation_config = model.generation_config
    return empty
