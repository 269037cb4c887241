"""One recipe for all training programs: `run_recipe` runs a `Recipe`, which says what is trained, on what, and how.

A program subclasses `Recipe` and calls `run_recipe` in its `main`. The order of a run: arguments, accelerator, output
folder, data and model (`load`), optimizer (`prepare`), checkpoint or first evaluation, loop, best model, final model,
test (`final_results`), `all_results.json`, end of the processes, `report`, push to the Hub.
"""

import dataclasses
import inspect
import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.files import write_json
from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.training.arguments import TrainingArguments, parse_arguments
from hf_synlm.training.checkpoints import BestModel, read_state
from hf_synlm.training.export import CheckpointUploads, check_repository, export_run, push_final_model
from hf_synlm.training.loop import TrainingLoop, is_due, start_or_resume
from hf_synlm.training.output_folder import ARGUMENTS_FILE, RESULTS_FILE, check_space, end_run, output_folder
from hf_synlm.training.run import Run, TrainingState, course_settings, make_accelerator, make_optimizer, set_up_layers
from hf_synlm.training.samplers import EpochSampler, PaddedBatchSampler, StepSampler, make_loader
from hf_synlm.training.steps import model_loss
from hf_synlm.viz import SentenceView

PACKAGE = Path(__file__).parents[1]
# Of generated samples.
NUM_SENTENCES = 3
NEW_TOKENS = 20


class Splits(NamedTuple):
    """Encoded data of the same type; `test` may be missing."""

    train: Any
    validation: Any
    test: Any = None


class Recipe(ABC):
    """What a training program adds to `run_recipe`.

    Fields:
        program: name of the module; also of the run in the trackers.
        parts: names of the attributes that hold the arguments; their annotations are dataclasses.
        mappings: names of arguments that hold mappings (see `parse_arguments`).
        model_arguments: the model.
        data: where examples come from.
        arguments: of every run; in `parts`, the last one.
        tokenizer: of the model; `load` sets it.
        examples: to train on; `load` sets them.
        collate: examples -> batch; `load` sets it.

    Args:
        accelerator: of the run.
        *arguments: one instance per name in `parts`.
    """

    program: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    mappings: ClassVar[tuple[str, ...]] = ("config_overrides",)
    model_arguments: Any
    data: Any
    arguments: TrainingArguments
    tokenizer: PreTrainedTokenizerBase
    examples: Any
    collate: Callable[[list[Any]], dict[str, Any]]

    def __init__(self, accelerator: Accelerator, *arguments: Any):
        self.accelerator = accelerator
        for name, value in zip(self.parts, arguments, strict=True):
            setattr(self, name, value)

    @classmethod
    def argument_types(cls) -> list[type]:
        """The dataclasses of `parts`."""
        types = get_type_hints(cls)
        return [types[name] for name in cls.parts]

    # ------------------------------------------------------------------------------------------ before training
    @abstractmethod
    def check(self) -> None:
        """Complete the arguments, before anything is written.

        Raises:
            ValueError: they exclude each other or the launcher's choice.
        """

    @abstractmethod
    def load(self) -> PreTrainedModel:
        """Read data, tokenizer and model.

        Every process calls. Everything that would stop the run later, such as test data, is read here. The random
        state is that of the run's seed.

        Returns:
            The model that is trained, on the CPU and not prepared.

        Raises:
            ValueError: bad input; a run that was to be replaced is kept.
        """

    @abstractmethod
    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Settings that a resumed run must repeat, besides `course_settings`.

        Args:
            model: of `load`.

        Returns:
            Name -> JSON value; "training_data" and "validation" are fingerprints.
        """

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, Any, Any]:
        """Make the optimizer and its schedule, and prepare them and the model with accelerate.

        Args:
            model: of `load`.

        Returns:
            Model, optimizer and schedule, for `Run`. The recipe keeps no reference to the prepared model.
        """
        return self.accelerator.prepare(model, *make_optimizer(model, self.arguments, self.learning_rates(model)))

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """Learning rates of modules that differ from `learning_rate`, by name: GPST's parser has its own."""
        rate = getattr(self.model_arguments, "parser_learning_rate", None)
        return {} if model.config.model_type != "gpst" or rate is None else {"parser": rate}

    def sampler(self, consumed: int = 0) -> StepSampler | EpochSampler:
        """Training batches of this process that begin after what all processes have consumed; default: shuffled."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        batch_size = self.arguments.per_device_train_batch_size
        return StepSampler(len(self.examples), batch_size, self.arguments.seed, rank, world_size, consumed)

    def padded_sampler(self, lengths: np.ndarray, max_padded_length: int, consumed: int) -> PaddedBatchSampler:
        """Training batches of this process, of sentences of similar `lengths` (see `PaddedBatchSampler`)."""
        return PaddedBatchSampler(
            lengths,
            self.arguments.per_device_train_batch_size,
            max_padded_length,
            self.data.batch_group_size,
            self.arguments.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            consumed=consumed,
        )

    def loader(self, run: Run) -> DataLoader:
        """Endless training batches that begin after `run.state.consumed`."""
        sampler = self.sampler(run.state.consumed)
        return make_loader(self.accelerator, self.examples, self.collate, self.arguments, sampler)

    def settle_steps(self) -> None:
        """Settle `max_train_steps`: at most the steps of `num_train_epochs`, if they are given."""
        epochs, sampler = self.arguments.num_train_epochs, self.sampler()
        per_step = sampler.consumed_per_micro_step * self.arguments.gradient_accumulation_steps
        self.arguments.limit_steps(-(-sampler.consumed_in(epochs) // per_step) if epochs else None)

    # ------------------------------------------------------------------------------------------ during training
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective of a micro batch and its named parts, detached; see `optimizer_steps`."""
        return model_loss(model, batch)

    @abstractmethod
    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate, print and log; every process calls.

        Args:
            model: of the run.
            step: optimizer steps done.

        Returns:
            The evaluation (JSON) with the key "step".
        """

    def best_model(self) -> BestModel | None:
        """Which evaluation gives the final model and when to stop early; `None`: the last step gives it."""
        return None

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after a step that is not the last one."""
        return is_due(step, self.arguments.evaluation_steps, self.arguments.num_steps)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """What is shown and noted of the mean losses of some steps."""
        return means

    def generate(self, model: nn.Module, step: int) -> None:
        """Print and log a few generated sentences with their trees; every process calls, the main one generates."""
        if self.accelerator.is_main_process:
            plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
            # Training seeds every micro step anew, so that this changes nothing there.
            torch.manual_seed(self.arguments.seed + step)
            texts = generate_trees(plain, self.tokenizer)
            self.accelerator.print(f"step {step}: generated\n" + "\n".join(texts))
            self.accelerator.log({f"generated/{number}": text for number, text in enumerate(texts)}, step=step)
        self.accelerator.wait_for_everyone()

    def flops_per_token(self, model: PreTrainedModel) -> float | None:
        """FLOPs of training per token (see `flops.py`); `None`: unknown, utilization is not shown."""
        return None

    # ------------------------------------------------------------------------------------------ after training
    @abstractmethod
    def card_facts(self, run: Run) -> dict[str, Any]:
        """What the model card states about the run, such as "training_data" and "training_procedure"."""

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Measure the final model; every process calls.

        Args:
            run: whose model is the final one.
            step: that it is from.

        Returns:
            Entries of `all_results.json` besides those that every run has, such as "test".
        """
        return {}

    @abstractmethod
    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Finish on the main process: what other processes need not wait for, such as loading the saved model.

        Args:
            run: ended; its model is not wrapped any more.
            folder: of the saved model.
            results: of `all_results.json`, which is written again if this changes them.

        Returns:
            The closing line.
        """


def kept_evaluation(results: dict[str, Any]) -> dict[str, Any]:
    """Find the evaluation of the final model.

    Args:
        results: of `all_results.json`.

    Returns:
        One of its "evaluations".
    """
    step = results.get("best_step", results["step"])
    return next(item for item in results["evaluations"] if item["step"] == step)


def improvement(results: dict[str, Any], name: str) -> str:
    """Say how a loss of the validation text fell.

    Args:
        results: of `all_results.json`.
        name: of the loss, such as "nats_per_sentence".

    Returns:
        The beginning of a closing line.
    """
    before, after = (found["losses"][name] for found in (results["evaluations"][0], kept_evaluation(results)))
    return f"validation {name.replace('_', ' ')} {before:.2f} -> {after:.2f} (best at step {results['best_step']})"


def run_recipe(recipe_type: type[Recipe], argv: Sequence[str] | None = None) -> None:
    """Run a training program from its command line to the push of its model.

    With the command line of the process, an error of the user is one line on stderr and exit status 2; the environment
    variable HF_SYNLM_TRACEBACK=1 shows where it was raised.

    Args:
        recipe_type: the program.
        argv: command line without the program name; default: the process's.

    Raises:
        ValueError: wrong arguments or input. A run that was to be replaced is put back.
        FloatingPointError: a loss became NaN or infinite.
        OSError: a checkpoint or the model cannot be written; the message says how to go on.
        SystemExit: with status 0, after SIGTERM or SIGINT, when a checkpoint has been saved.
        RuntimeError: the finished run cannot be pushed to the Hub.
    """
    try:
        _run(recipe_type, argv)
    except (ValueError, OSError, FloatingPointError) as error:
        if argv is not None or os.environ.get("HF_SYNLM_TRACEBACK") or not _is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _is_user_error(error: Exception) -> bool:
    """Whether the cause is input, not a bug: a ValueError of another library (a wrong shape) is one of our bugs."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return not isinstance(error, ValueError) or raised_in.is_relative_to(PACKAGE)


def _run(recipe_type: type[Recipe], argv: Sequence[str] | None) -> None:
    """Run the program; errors are raised."""
    started = time.monotonic()
    description = (inspect.getdoc(recipe_type) or "").partition("\n")[0]
    parsed = parse_arguments(recipe_type.argument_types(), argv, recipe_type.mappings, description)
    *others, arguments = parsed
    accelerator = make_accelerator(arguments)
    recipe = recipe_type(accelerator, *parsed)
    recipe.check()
    with output_folder(accelerator, arguments, *others) as checkpoint:
        set_seed(arguments.seed)
        model = recipe.load()
        recipe.settle_steps()
        accelerator.print(f"{arguments.num_steps:,} steps")
        accelerator.print(
            f"model: {type(model).__name__}, {model.num_parameters():,} parameters, "
            f"vocabulary {model.config.vocab_size}"
        )
        set_up_layers(model, arguments)
        shared = course_settings(arguments, model.config, accelerator, recipe.tokenizer)
        settings = {**shared, **recipe.settings(model)}
        if checkpoint is not None:
            read_state(checkpoint, settings)  # refuses other settings
        preflight(accelerator, arguments, model)
        run = Run(accelerator, arguments, *recipe.prepare(model), TrainingState())
    _start_tracking(accelerator, recipe.program, *parsed)
    step, speed = _train(recipe, run, checkpoint, settings)
    folder = run.output_dir / "model"
    export_run(run, recipe.tokenizer, recipe.card_facts(run), folder)
    results = {
        "step": run.state.step,
        **({"best_step": step} if "best" in run.state.notes else {}),
        **speed,
        "train": run.state.notes.get("train", []),
        "evaluations": run.state.notes["evaluations"],
        **recipe.final_results(run, step),
        "seconds_of_this_process": round(time.monotonic() - started, 1),
    }
    if accelerator.is_main_process:
        write_json(run.output_dir / RESULTS_FILE, results)
    end_run(run)
    if accelerator.is_main_process:
        closing_line = recipe.report(run, folder, results)
        write_json(run.output_dir / RESULTS_FILE, results)
        print(closing_line)
    push_final_model(run)


def preflight(accelerator: Accelerator, arguments: TrainingArguments, model: nn.Module) -> None:
    """Refuse a run that could not be finished.

    Args:
        accelerator: of the run. Every process has to call.
        arguments: of the run.
        model: that is trained.

    Raises:
        ValueError: the disk is too small, the repository of `push_to_hub` cannot be made, or `generation_steps` is set
            with FSDP.
    """
    if arguments.generation_steps and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("generation_steps does not go with the shards of FSDP. Set it to 0, or train with DDP.")
    if accelerator.is_main_process:
        check_space(arguments, model)
        check_repository(arguments)
    accelerator.wait_for_everyone()


def _start_tracking(accelerator: Accelerator, name: str, *arguments: Any) -> None:
    """Write all arguments to `output_dir/arguments.json` (without the token) and to the trackers, if there are any."""
    settings = {key: value for item in arguments for key, value in dataclasses.asdict(item).items()}
    del settings["hub_token"]
    if accelerator.is_main_process:
        write_json(Path(settings["output_dir"]) / ARGUMENTS_FILE, settings)
    if accelerator.log_with:
        simple = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in settings.items()}
        accelerator.init_trackers(name, config=simple)


def _train(recipe: Recipe, run: Run, checkpoint: Path | None, settings: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Train from the checkpoint or from step 0; the step that the final model is from, and the speed."""
    best = recipe.best_model()
    start_or_resume(run, checkpoint, settings, recipe.evaluate, best)
    uploads = CheckpointUploads(run, recipe.tokenizer, lambda: recipe.card_facts(run))
    speed = TrainingLoop(run, recipe, best, after_checkpoint=uploads).train()
    uploads.finish()
    if best is None:
        return run.state.step, speed
    step = best.restore(run)
    run.accelerator.print(f"the best model is that of step {step}")
    return step, speed


def generate_trees(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sample sentences from the beginning of a text on.

    Args:
        model: a causal language model; its mode (train or eval) does not change.
        tokenizer: of the model.

    Returns:
        Each sentence, followed by its tree, if the model has trees.
    """
    texts = []
    prompts = [""] * NUM_SENTENCES
    for generated in generate_texts(model, tokenizer, prompts, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=20):
        lines = [generated.text]
        if generated.tree.hypotheses:
            lines.append(SentenceView(generated.tree).text())
        texts.append("\n".join(lines))
    return texts
