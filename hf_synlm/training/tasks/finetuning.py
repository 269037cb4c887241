# SPDX-License-Identifier: Apache-2.0
"""Shared by the fine-tuning programs: the pretrained model, the recipe, evaluation on all processes.

Models of this library and of transformers go through the same code. They differ only where the paper's input layout
asks for it (`takes`), and at the export.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import LABEL_PADDING
from hf_synlm.data.files import read_json
from hf_synlm.data.tokenizers import (
    CLS_TOKEN,
    GPST_PAD_TOKEN,
    SEP_TOKEN,
    check_vocabulary,
    load_tokenizer,
    num_model_tokens,
)
from hf_synlm.evaluation.results import EvaluationResult, describe_hardware, library_versions
from hf_synlm.evaluation.text.words import unknown_ids
from hf_synlm.hub.checkpoint import one_line_errors
from hf_synlm.hub.export import check_same_tokens
from hf_synlm.hub.loading import whole
from hf_synlm.training.arguments.base import check_overrides
from hf_synlm.training.arguments.finetuning import ModelArguments
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.export import hub_facts, model_name
from hf_synlm.training.engine.output_folder import ARGUMENTS_FILE, EVALUATION_FILE
from hf_synlm.training.engine.run import OWN_TOKENIZER, Run, precision_of
from hf_synlm.training.engine.steps import map_rows, model_loss, to_device
from hf_synlm.training.tasks.example_tables import ExampleDataset
from hf_synlm.training.tasks.gpst_training import GPSTTraining

# Arguments that do not change the scores, or whose content is described elsewhere in the result.
_PLACES = frozenset(
    """output_dir overwrite_output_dir resume_from_checkpoint with_tracking report_to push_to_hub
    hub_model_id logging_steps checkpointing_steps checkpoints_total_limit keep_at_words dataloader_num_workers profile
    preprocessing_num_workers model_name_or_path trust_remote_code dataset_name
    dataset_config_name""".split()
)
# Suffixes of the arguments that name files.
_FILES = ("_file", "_files", "_trees")


def takes(model: nn.Module, name: str) -> bool:
    """Whether `forward` of `model` has the argument `name`, such as `sentence_ids`."""
    return name in inspect.signature(model.forward).parameters


# ---------------------------------------------------------------------------------------------- the recipe
class FineTuning(GPSTTraining):
    """Train on examples, evaluate, go back to the best model. The untrained model is evaluated, but never the best.

    `task` is the name of the model's task on the Hub. `load` sets `sources`: the `role` (an argument), `path`, and
    checksum of everything that was read.
    """

    task: ClassVar[str] = "text-generation"
    auto_class: ClassVar[Any] = AutoModelForCausalLM
    score = "loss"
    repeated = "evaluation_steps"
    needs_whole = "the evaluation"
    choice = ""
    model_arguments: ModelArguments
    examples: ExampleDataset
    sources: list[dict[str, Any]]

    def read_config(self, **fields: Any) -> PreTrainedConfig:
        """Configuration of the pretrained model, changed by `fields` and by the overrides, which win."""
        arguments = self.model_arguments
        options = {"trust_remote_code": arguments.trust_remote_code}
        plain = AutoConfig.from_pretrained(arguments.model_name_or_path, **options)
        overrides = check_overrides(type(plain), arguments.config_overrides)
        config = AutoConfig.from_pretrained(arguments.model_name_or_path, **options, **{**fields, **overrides})
        if hasattr(config, "validate_architecture"):
            config.validate_architecture()
        return config

    def choose_tokenizer(self, config: PreTrainedConfig, *roles: str) -> None:
        """Set `tokenizer`: that of the model, with all special tokens that fine-tuning needs.

        A missing token of `roles` ("cls_token", "sep_token") gets the name of GPST's; for missing padding the end token
        is taken, if there is one. The tokenizer may then have more tokens than the model, which `load_model` resizes.
        One that has more before belongs to another model and is refused.
        """
        arguments, kind = self.model_arguments, self.auto_class.__name__.removeprefix("AutoModel")
        if kind not in getattr(config, "model_classes", (kind,)):
            raise ValueError(
                f"{arguments.model_name_or_path}: there is no {type(config).__name__.removesuffix('Config')}{kind}. "
                "Choose an architecture that has it (see docs/what-works.md)."
            )
        name = arguments.tokenizer_name or arguments.model_name_or_path
        if config.model_type == "gpst":
            tokenizer = load_tokenizer(name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
        check_vocabulary(tokenizer, config.vocab_size, OWN_TOKENIZER)
        names = {"cls_token": CLS_TOKEN, "sep_token": SEP_TOKEN}
        added = {role: names[role] for role in roles if getattr(tokenizer, role) is None}
        if tokenizer.pad_token is None:
            added["pad_token"] = tokenizer.eos_token or GPST_PAD_TOKEN
        if added:
            tokenizer.add_special_tokens(added)
        self.tokenizer = tokenizer

    def load_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """The pretrained model in float32, with an embedding for every token and the tokenizer's special token ids."""
        arguments, tokenizer = self.model_arguments, self.tokenizer
        with one_line_errors(arguments.model_name_or_path, "model"):
            loaded = self.auto_class.from_pretrained(
                arguments.model_name_or_path,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=arguments.ignore_mismatched_sizes,
                trust_remote_code=arguments.trust_remote_code,
                output_loading_info=True,
            )
            model = whole(loaded) if self.auto_class is AutoModelForCausalLM else loaded[0]
        if num_model_tokens(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(num_model_tokens(tokenizer))
        for name in ("pad_token_id", "cls_token_id", "sep_token_id"):
            if hasattr(model.config, name) and getattr(tokenizer, name) is not None:
                setattr(model.config, name, getattr(tokenizer, name))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        check_same_tokens(model.config, tokenizer)  # as the export does, before hours of training
        return model

    def metric(self, evaluation: dict[str, Any]) -> float:
        """The number of `evaluation` that the best model minimises; default: minus the score."""
        return -self.score_of(evaluation)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Data and course of the run."""
        course = {"learning_rates": self.learning_rates(model), "by_epochs": bool(self.arguments.num_train_epochs)}
        return {**super().settings(model), **course}

    def best_model(self) -> BestModel:
        """The evaluation with the lowest `metric`."""
        return BestModel(self.metric, self.arguments.early_stopping_patience, first_step=1)

    def evaluation_due(self, step: int) -> bool:
        """At intervals, or at the ends of epochs."""
        arguments = self.arguments
        if arguments.evaluation_steps or not arguments.num_train_epochs:
            return super().evaluation_due(step)
        epoch, before = (count * self.samples_per_step() // len(self.examples) for count in (step, step - 1))
        return epoch > before

    def say_unknown_tokens(self) -> None:
        """Print a remark if the tokenizer does not know many words of the first examples."""
        first = self.examples.table.select(range(min(1000, len(self.examples))))
        read = np.concatenate([example["input_ids"] for example in first])
        share = np.isin(read, list(unknown_ids(self.tokenizer))).mean()
        if share > 0.1:
            self.accelerator.print(
                f"{share:.0%} of the tokens stand for words that the tokenizer does not know: the model learns little "
                "of such texts. A model of word pieces reads them all."
            )

    def dataset(self) -> str | None:
        """Data set of the Hub, or a folder; None: examples come from files."""
        return None

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Base model, data, steps and examples."""
        base = self.model_arguments.model_name_or_path
        procedure = self.procedure(run, f"{run.state.consumed} examples read, ")
        facts = {**super().card_facts(run), **hub_facts(base, self.dataset())}
        return {**facts, "task": self.task, "training_procedure": f"Fine-tuned from {model_name(base)}. {procedure}"}

    def map_examples(
        self, model: nn.Module, examples: ExampleDataset, work: Callable[[Any, dict[str, Any]], list[Any]], what: str
    ) -> list[Any]:
        """Apply `work` (model, batch -> one result per row) to all examples in evaluation mode; every process calls."""
        plain = self.accelerator.unwrap_model(model)

        def of_rows(rows: list[int]) -> list[Any]:
            return work(plain, to_device(self.collate([examples[row] for row in rows]), self.accelerator.device))

        size = self.arguments.per_device_eval_batch_size
        with evaluation_mode(plain), torch.no_grad():
            return map_rows(self.accelerator, examples.lengths, size, of_rows, what)

    def mean_losses(self, model: nn.Module, examples: ExampleDataset) -> dict[str, float]:
        """Objective and its parts in nats on held-out texts; every process calls.

        Batches are weighted by their labeled tokens.
        """

        def losses(plain: nn.Module, batch: dict[str, Any]) -> list[dict[str, float]]:
            counts = (batch["labels"] != LABEL_PADDING).sum(1).tolist()
            loss, parts = model_loss(plain, batch)
            means = {"loss": float(loss), **{name: float(part) for name, part in parts.items()}}
            return [{"tokens": count, **{name: mean * count for name, mean in means.items()}} for count in counts]

        sums = self.map_examples(model, examples, losses, "validating")
        totals = {name: sum(row[name] for row in sums) for name in sums[0]}
        num_tokens = totals.pop("tokens")
        return {name: total / num_tokens for name, total in totals.items()}

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Examples that were read."""
        return {"examples": run.state.consumed}

    def save_scores(self, run: Run, task: str, scores: Mapping[str, float], results: dict[str, Any]) -> None:
        """Write `evaluation.json` and `evaluation.md`, which `synlm evaluate summary` and `plot` read.

        Options are the arguments of `arguments.json` that change the scores, number of processes, and precision. Runs
        that differ in them, in the data, or in architecture and size of the model are not averaged. The weights they
        begin with may differ: the seed of pretraining varies, too.
        """
        arguments = read_json(run.output_dir / ARGUMENTS_FILE)
        model = run.accelerator.unwrap_model(run.model)
        EvaluationResult(
            task=task,
            scores=dict(scores),
            model={
                "name": arguments["model_name_or_path"],
                "revision": getattr(model.config, "_commit_hash", None),
                "architecture": type(model).__name__,
                "num_parameters": model.num_parameters(),
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            options={
                **{k: v for k, v in arguments.items() if k not in _PLACES and not k.endswith(_FILES)},
                "num_processes": run.accelerator.num_processes,
                "mixed_precision": precision_of(run.accelerator),
            },
            data={"files": self.sources},
            seconds=results["seconds_of_this_process"],
            versions=library_versions("accelerate", "datasets", "scikit-learn", "rouge-score"),
            hardware=describe_hardware(run.accelerator.device),
        ).save(run.output_dir / EVALUATION_FILE)
