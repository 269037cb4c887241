# SPDX-License-Identifier: Apache-2.0
"""What a training program adds to a run: its arguments, data, model, objective, evaluation and report.

A program subclasses `Recipe` and calls `run_recipe` (`runner.py`) in its `main`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.compiled_levels import LevelModule
from hf_synlm.evaluation.trees.gold_treebank import Treebank
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.arguments.command_lines import COMMAND_LINES
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.run import Run, make_optimizer
from hf_synlm.training.engine.samplers import EpochEnds, EpochSampler, PaddedBatchSampler, StepSampler, make_loader
from hf_synlm.training.engine.steps import is_due, map_rows, model_loss
from hf_synlm.trees.spans import Span


class Splits(NamedTuple):
    """Encoded data of the same type; `test` may be missing."""

    train: Any
    validation: Any
    test: Any = None


class Recipe(ABC):
    """What a training program adds to `run_recipe`.

    A new program must set `program`, write `load` (which sets `tokenizer`, `examples`, `held_out` and `collate`)
    and `evaluate`, and stand in `COMMAND_LINES`. The other methods have defaults: AdamW, shuffled batches, the model's
    own loss, evaluation every `evaluation_steps` (or at the `ends` of epochs), and as the final model that with the
    lowest `nats` in the losses of an evaluation.

    Fields:
        program: name of the module; also of the run in the trackers.
        parts: dataclasses of the arguments, by the name of the attribute that holds them; `arguments` is last.
        score: which loss of the evaluations the closing line shows.
        repeated: names of arguments, divided by spaces, that a resumed run must repeat.
        needs_whole: what FSDP does not allow, because it needs the whole model; empty: nothing.
        num_optimizers: float16 allows one only.
        choice: by what the best model is chosen, for the model card; empty: not stated.
        text_style: how the text is written, for a model whose configuration does not say it.
        ends: ends of epochs, for programs that evaluate there; see `count_epochs`.
        examples: what `collate` makes batches of: a sequence, indexed by the sampler.
        held_out: the same for validation.
    """

    program: ClassVar[str]
    parts: ClassVar[Mapping[str, type]]
    score: str = "nats_per_sentence"
    repeated: ClassVar[str] = ""
    needs_whole: str = ""
    num_optimizers: ClassVar[int] = 1
    choice: str = "validation likelihood"
    text_style: str | None = None
    ends: Any = None
    model_arguments: Any
    data: Any
    arguments: TrainingArguments
    tokenizer: PreTrainedTokenizerBase
    examples: Any
    held_out: Any
    collate: Callable[[list[Any]], dict[str, Any]]

    def __init_subclass__(cls) -> None:
        """Look up the arguments of a program."""
        if "program" in vars(cls):
            cls.parts = COMMAND_LINES[cls.program]

    def __init__(self, accelerator: Accelerator, *arguments: Any):
        self.accelerator = accelerator
        for name, value in zip(self.parts, arguments, strict=True):
            setattr(self, name, value)

    @classmethod
    def default_config(cls, device: str, *arguments: Any) -> str | None:
        """Shipped configuration for what a command line leaves open; `device` is a type of torch. Default: none."""
        return None

    # ------------------------------------------------------------------------------------------ before training
    def check(self) -> None:
        """Complete the arguments; raise ValueError if they exclude each other. Nothing has been written yet."""
        if self.needs_whole and self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(f"FSDP shards the model, but {self.needs_whole} needs the whole model. Use DDP.")
        if self.num_optimizers > 1 and self.accelerator.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision 'fp16' works only with one optimizer, but this program has two. Set "
                "mixed_precision to 'bf16' or 'no'."
            )

    @abstractmethod
    def load(self) -> PreTrainedModel:
        """Read data, tokenizer and model, which stays on the CPU; every process calls.

        Everything that would stop the run later, such as test data, is read here. The random state is that of the
        run's seed.
        """

    def begin(self, model: PreTrainedModel) -> None:
        """Change the model before the first step; a run that resumes has the change in its checkpoint."""
        return

    def fingerprints(self) -> tuple[Any, Any]:
        """Fingerprints of the training and of the validation data."""
        return self.examples.fingerprint(), self.held_out.fingerprint()

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """JSON settings that a resumed run must repeat, besides `course_settings`."""
        given = {name: value for part in self.parts for name, value in vars(getattr(self, part)).items()}
        data = dict(zip(("training_data", "validation"), self.fingerprints(), strict=True))
        return {**data, **{name: given[name] for name in self.repeated.split()}}

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, Any, Any]:
        """Make optimizer and schedule, and prepare them and the model with accelerate; returns all three.

        The recipe keeps no reference to the prepared model.
        """
        # The scaler of float16 skips steps, of which a fused optimizer learns on the GPU only.
        fused = self.accelerator.device.type == "cuda" and self.accelerator.scaler is None
        made = make_optimizer(model, self.arguments, self.learning_rates(model), fused or None)
        return self.accelerator.prepare(model, *made)

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """Learning rates of modules that differ from `learning_rate`, by a component of their parameters' names."""
        return {}

    def layers_to_compile(self, model: PreTrainedModel) -> list[nn.Module]:
        """Layers that `torch_compile` compiles; default: what computes by levels. Without any, it is refused."""
        return [module for module in model.modules() if isinstance(module, LevelModule)]

    def sampler(self, consumed: int = 0) -> StepSampler | EpochSampler:
        """Training batches of this process that begin after what all processes have consumed; default: shuffled."""
        batch_size = self.arguments.per_device_train_batch_size
        return StepSampler(len(self.examples), batch_size, self.arguments.seed, **self.share(consumed))

    def share(self, consumed: int) -> dict[str, int]:
        """Which batches are those of this process, for a sampler."""
        processes = {"rank": self.accelerator.process_index, "world_size": self.accelerator.num_processes}
        return {**processes, "consumed": consumed}

    def padded_sampler(
        self, lengths: np.ndarray, max_padded_length: int, consumed: int, kind: Any = PaddedBatchSampler
    ) -> PaddedBatchSampler:
        """Training batches of this process, of sentences of similar `lengths` (see `PaddedBatchSampler`)."""
        return kind(
            lengths,
            self.arguments.per_device_train_batch_size,
            max_padded_length,
            self.data.batch_group_size,
            self.arguments.seed,
            **self.share(consumed),
        )

    def loader(self, run: Run) -> DataLoader:
        """Endless training batches that begin after `run.state.consumed`."""
        sampler = self.sampler(run.state.consumed)
        return make_loader(self.accelerator, self.examples, self.collate, self.arguments, sampler)

    def samples_per_step(self) -> int:
        """What all processes consume in an optimizer step."""
        return self.sampler().consumed_per_micro_step * self.arguments.gradient_accumulation_steps

    def settle_steps(self) -> None:
        """Settle `max_train_steps`: at most the steps of `num_train_epochs`, if they are given."""
        epochs = self.arguments.num_train_epochs
        steps = -(-self.sampler().consumed_in(epochs) // self.samples_per_step()) if epochs else None
        self.arguments.limit_steps(steps)

    def count_epochs(self) -> None:
        """Evaluate at the ends of epochs; refuse steps longer than an epoch."""
        sampler: Any = self.sampler()
        self.ends = EpochEnds(sampler, self.samples_per_step())
        self.ends.step(0)

    # ------------------------------------------------------------------------------------------ during training
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective of a micro batch and its named parts, detached; see `optimizer_steps`."""
        return model_loss(model, batch)

    def flops_per_token(self, model: PreTrainedModel) -> float | None:
        """Floating point operations of a training step per token, for the share of the peak; default: unknown."""
        return None

    @abstractmethod
    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate after `step` optimizer steps, print and log; every process calls. Returns JSON with "step"."""

    def tell(self, step: int, name: str, what: str, values: Mapping[str, float], form: str = ".4g") -> None:
        """Print and log what was measured of the data `name`; `what` stands behind the name, `form` is of numbers."""
        text = "  ".join(f"{key} {value:{form}}" for key, value in values.items())
        self.accelerator.print(f"step {step}: {name}{what}: {text}")
        self.accelerator.log({f"{name}/{key}": value for key, value in values.items()}, step=step)

    def best_model(self) -> BestModel | None:
        """Which evaluation gives the final model and when to stop early; `None`: the last step gives it."""
        return BestModel(lambda evaluation: evaluation["losses"]["nats"], self.arguments.early_stopping_patience)

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after a step that is not the last one."""
        if self.ends is not None:
            return step in self.ends
        return is_due(step, self.arguments.evaluation_steps, self.arguments.num_steps)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """What is shown and noted of the mean losses of some steps."""
        return means

    def parse(self, model: nn.Module, treebank: Treebank, batch_size: int = 32, **options: Any) -> list[list[Span]]:
        """The best tree of each sentence, by the options of `parse`; the processes share the work and all must call."""
        plain, words = self.accelerator.unwrap_model(model), treebank.words

        def parse(rows: list[int]) -> list[list[Span]]:
            return parse_words(plain, self.tokenizer, [words[row] for row in rows], batch_size=batch_size, **options)

        return map_rows(self.accelerator, treebank.lengths, batch_size, parse, "parsing")

    # ------------------------------------------------------------------------------------------ after training
    def base_model(self) -> str | None:
        """Folder or Hub name of the model that the run begins with."""
        return self.model_arguments.model_name_or_path

    def card_facts(self, run: Run) -> dict[str, Any]:
        """What the model card states about the run, such as "training_data" and "training_procedure"."""
        return {
            **hub_facts(self.base_model()),
            "training_data": self.data.describe(),
            "training_procedure": self.procedure(run),
        }

    def procedure(self, run: Run, read: str = "") -> str:
        """Steps, choice of the model, what it has `read`, and seed."""
        notes, steps = run.state.notes, f"{run.state.step} steps"
        if self.ends is not None:
            steps += f" ({len(notes['evaluations']) - 1} epochs)"
        best = notes.get("best", {}).get("step", run.state.step)
        by = f" by {self.choice}" if self.choice else ""
        where = f"`training/{self.program}.py`{by}, that of step {best}"
        return f"The best of {steps} of {where}; {read}seed {self.arguments.seed}."

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Measure the final model, which is that of `step`; every process calls.

        Returns entries of `all_results.json` besides those that every run has, such as "test".
        """
        return {}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:  # noqa: B027  # nothing by default
        """Finish on the main process, without the others, such as by loading the saved model from `folder`.

        `run.model` is not wrapped any more. `all_results.json` is written again if `results` change. Default: nothing.
        """

    def score_of(self, evaluation: dict[str, Any]) -> float:
        """What `score` names, of an evaluation."""
        return evaluation["losses"][self.score]

    def improvement(self, results: dict[str, Any]) -> str:
        """The closing line: how the `score` of the validation data changed."""
        before, after = map(self.score_of, (results["evaluations"][0], kept_evaluation(results)))
        return f"validation {self.score.replace('_', ' ')} {before:.5g} -> {after:.5g}"


def kept_evaluation(results: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of the final model in `all_results.json`."""
    step = results.get("best_step", results["step"])
    return next(item for item in results["evaluations"] if item["step"] == step)
