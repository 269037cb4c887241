"""How every training script begins and ends: accelerator, output folder, trackers, model, export."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, ProjectConfiguration, parse_flag_from_env
from checkpoints import (
    PARTIAL_SUFFIX,
    TrainingState,
    check_writable,
    find_checkpoint,
    remove_partial,
    tokenizer_hash,
    write_json,
)
from run_arguments import TrainingArguments
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.hub.card import fill_card
from hf_synlm.hub.export import export_model, push_to_hub

logger = get_logger(__name__)

ARGUMENTS_FILE = "arguments.json"
RESULTS_FILE = "all_results.json"


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


def prepare_output_dir(accelerator: Accelerator, arguments: TrainingArguments) -> Path | None:
    """Check the output folder, create it, and find the checkpoint to resume from.

    An unfinished run in the folder is resumed, so that a job that is started again by the same command goes on.

    Args:
        accelerator: of the run.
        arguments: of the run.

    Returns:
        The checkpoint to resume from, or `None` for a fresh start.

    Raises:
        ValueError: when the folder holds something else or a finished run and is not to be overwritten, when it cannot
            be written to, or when the named checkpoint is missing or half-written.
    """
    output_dir = Path(arguments.output_dir)
    if arguments.overwrite_output_dir and not arguments.resume_from_checkpoint:
        checkpoint = None
        accelerator.wait_for_everyone()  # every process has looked before the first deletes
        if accelerator.is_main_process and output_dir.exists():
            _clear_run(output_dir)
    else:
        checkpoint = _find_start(output_dir, arguments.resume_from_checkpoint)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        check_writable(output_dir)
        remove_partial(output_dir)
        if not (output_dir / ARGUMENTS_FILE).is_file():  # from here on, the folder holds a run
            write_json(output_dir / ARGUMENTS_FILE, _without_token(dataclasses.asdict(arguments)))
    accelerator.wait_for_everyone()
    return checkpoint


def _find_start(output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from; an unfinished run is resumed without being asked for."""
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"Output folder {str(output_dir)!r} is a file. Choose another --output_dir.")
    in_use = output_dir.is_dir() and any(output_dir.iterdir())
    if wanted is None and in_use:
        advice = "Choose another --output_dir, or delete its content with --overwrite_output_dir."
        if not (output_dir / ARGUMENTS_FILE).is_file():
            raise ValueError(f"Output folder {str(output_dir)!r} is not empty and holds no run. {advice}")
        if (output_dir / RESULTS_FILE).is_file():
            raise ValueError(f"Output folder {str(output_dir)!r} holds a finished run. {advice}")
    checkpoint = find_checkpoint(output_dir, wanted or "latest")
    if checkpoint is not None:
        logger.warning(
            f"The run resumes from {checkpoint}. To start afresh, choose another --output_dir or pass "
            "--overwrite_output_dir."
        )
    elif in_use or wanted:
        logger.warning(f"{output_dir} holds no complete checkpoint: training starts from step 0.")
    return checkpoint


def _clear_run(folder: Path) -> None:
    """Delete the content of an output folder; refuse where a wrong path would lose more than a run."""
    if folder.resolve() in (Path.home().resolve(), Path.cwd().resolve(), Path(folder.resolve().anchor)):
        raise ValueError(f"--overwrite_output_dir would delete {str(folder)!r}. Choose a folder for runs only.")
    if (folder / ".git").exists():
        raise ValueError(f"--overwrite_output_dir would delete the repository {str(folder)!r}. Choose another folder.")
    for item in folder.iterdir():
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()


def _without_token(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "hub_token"}


def start_tracking(accelerator: Accelerator, name: str, *arguments: Any) -> None:
    """Write all arguments to `output_dir/arguments.json` (without the token) and to the trackers, if there are any."""
    settings = {key: value for item in arguments for key, value in dataclasses.asdict(item).items()}
    settings = _without_token(settings)
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


def course_settings(
    arguments: TrainingArguments,
    config: Any,
    data_fingerprint: str,
    world_size: int,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Everything that decides the course of a run and that all scripts share; folders and intervals do not.

    Args:
        arguments: of the run.
        config: of the model.
        data_fingerprint: hash of the training data.
        world_size: number of processes.
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
        "training_data": data_fingerprint,
        "tokenizer": tokenizer_hash(tokenizer),
        "num_processes": world_size,
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
        ValueError: for overrides, and when the tokenizer has ids that the model has not.
    """
    if overrides:
        raise ValueError("config_overrides cannot change the model of model_name_or_path. Leave one of them out.")
    model = model_class.from_pretrained(name, dtype=torch.float32)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}. "
            "Pass --tokenizer_name with the model's own tokenizer."
        )
    return model


def save_tokenizer_once(
    accelerator: Accelerator, folder: Path, make: Callable[[], PreTrainedTokenizerBase], made_from: dict[str, Any]
) -> None:
    """Make a tokenizer on the main process and save it; a resumed run finds that of its first part.

    Args:
        accelerator: of the run. Every process has to call.
        folder: where the tokenizer lies afterwards; if it exists, nothing is made.
        make: makes the tokenizer.
        made_from: files and options that it depends on; written next to it.

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
    """Export model, tokenizer, code and card to `output_dir/model`, and push it; every process has to call.

    Args:
        run: of this process.
        tokenizer: of the model.
        facts: for the card; the name is added.

    Returns:
        The folder.
    """
    accelerator = run.accelerator
    folder = run.output_dir / "model"
    weights = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        plain = accelerator.unwrap_model(run.model)
        card = fill_card(
            plain.config, {"repo_id": run.arguments.hub_model_id or run.output_dir.resolve().name, **facts}
        )
        export_model(plain, tokenizer, folder, card=card, overwrite=True, state_dict=weights)
        if run.arguments.push_to_hub:
            push_to_hub(folder, run.arguments.hub_model_id, token=run.arguments.hub_token)
    accelerator.wait_for_everyone()
    return folder
