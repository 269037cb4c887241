"""What a training program adds to a run: its arguments, data, model, objective, evaluation and report.

A program subclasses `Recipe` and calls `run_recipe` (`runner.py`) in its `main`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.training.engine.arguments import TrainingArguments
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.run import (
    Run,
    make_optimizer,
)
from hf_synlm.training.engine.samplers import EpochSampler, PaddedBatchSampler, StepSampler, make_loader
from hf_synlm.training.engine.steps import is_due, model_loss
from hf_synlm.viz import SentenceView

PACKAGE = Path(__file__).parents[2]
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
