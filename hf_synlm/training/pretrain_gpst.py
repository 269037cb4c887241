"""Pretrain GPST on raw text.

    accelerate launch training/pretrain_gpst.py --config training/configs/gpst_tiny.yaml --output_dir runs/gpst_tiny

Text comes from files or from a data set of the Hub; if none is named, it is embedded. It is split into sentences,
encoded, and packed into contexts of whole sentences; every sentence gets a tree of its own. No trees are read for
training: treebanks only serve evaluation. `--architecture gpt2` trains a GPT-2 on the same contexts.
Paper: Hu et al., "Generative Pretrained Structured Transformers" (ACL 2024).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.collate import collate_contexts
from hf_synlm.data.contexts import ContextDataset
from hf_synlm.data.prepare import PreparedText
from hf_synlm.data.samples import EMBEDDED, resolve_embedded
from hf_synlm.data.tokenizers import special_token_ids
from hf_synlm.evaluation.treebank_parsing import (
    PUNCTUATION,
    Treebank,
    load_treebank,
    parse_words,
    score_baselines,
    score_numbers,
    score_table,
    score_trees,
)
from hf_synlm.losses import to_shares
from hf_synlm.module_tools import evaluation_mode
from hf_synlm.training.arguments import ModelArguments, TrainingArguments, check_choice, check_minimum, check_overrides
from hf_synlm.training.baseline_model import collate_plain, decoder_flops_per_token, make_baseline
from hf_synlm.training.checkpoints import BestModel
from hf_synlm.training.export import hub_facts
from hf_synlm.training.final_report import load_report_treebanks, report_saved_model
from hf_synlm.training.flops import gpst_flops_per_token
from hf_synlm.training.recipe import Recipe, kept_evaluation, run_recipe
from hf_synlm.training.run import Run, load_pretrained
from hf_synlm.training.samplers import shuffled_loader
from hf_synlm.training.steps import model_loss, to_device
from hf_synlm.training.text_contexts import DataArguments, load_contexts, load_text
from hf_synlm.trees import Span

Collate = Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]


@dataclass
class GPSTModelArguments(ModelArguments):
    """GPST, or a baseline without trees."""

    architecture: str = HfArg(
        default="gpst",
        help="gpst; or, as a baseline without trees, the model type of a causal language model of transformers, such "
        "as gpt2. Options about trees and the preset are for GPST only.",
    )
    model_preset: str | None = HfArg(default="gpst-small", help="Published size to start from.")
    document_end_token: bool = HfArg(
        default=False, help="End every document with the end token, so that the model learns when to stop."
    )
    parser_learning_rate: float | None = HfArg(
        default=1e-3, help="Peak learning rate of the parser, which gives the merge order."
    )

    def __post_init__(self):
        """Check that a baseline is trained from scratch."""
        if self.is_baseline and self.model_name_or_path is not None:
            raise ValueError(
                f"model_name_or_path {self.model_name_or_path!r} is for GPST; a {self.architecture} is trained from "
                "scratch. Leave one of them out."
            )
        super().__post_init__()

    @property
    def is_baseline(self) -> bool:
        """Whether the model is one of transformers."""
        return self.architecture != "gpst"


@dataclass
class EvaluationArguments:
    """What is measured during training and at its end."""

    validation_trees: str | None = HfArg(
        default=None,
        help="Treebank file for F1 during training; 'embedded', or 'none'; default: embedded for the embedded text, "
        "otherwise none.",
    )
    test_trees: str | None = HfArg(default=None, help="The same for the final report.")
    punctuation: str = HfArg(
        default="remove", help="Punctuation in treebanks: remove it before parsing, ignore it in the score, or keep it."
    )
    report_punctuation: list[str] = HfArg(
        default_factory=lambda: ["remove", "keep"],
        help="How the final report treats punctuation: one or more of these. Each has its own baselines.",
    )
    max_tree_sentences: int | None = HfArg(default=None, help="Read only the first trees of a treebank.")
    search_num_beams: int = HfArg(default=20, help="Beam of left-to-right parsing in evaluation; 0 disables.")
    load_best_model_at_end: bool = HfArg(
        default=False, help="Save the weights with the best validation loss as the final model."
    )
    final_report: bool = HfArg(
        default=False, help="At the end, load the saved model in a process without hf_synlm; parse and generate there."
    )

    def __post_init__(self):
        """Check the values."""
        for value in (self.punctuation, *self.report_punctuation):
            check_choice("punctuation", value, PUNCTUATION)
        check_minimum(self, 0, "search_num_beams")

    def complete(self, data: DataArguments) -> None:
        """Settle the treebanks; words of validation trees are validation text, if treebanks are all training text.

        Args:
            data: tells whether the training text is embedded; completed, too.
        """
        default = EMBEDDED if data.is_embedded else "none"
        for name, sample in (("validation_trees", "trees.valid.txt"), ("test_trees", "trees.test.txt")):
            value = getattr(self, name) or default
            setattr(self, name, None if value == "none" else resolve_embedded(value, sample))
        if data.only_trees and not data.has_validation_files and self.validation_trees is not None:
            data.validation_words = [self.validation_trees]

    def without_trees(self) -> None:
        """Disable evaluations of trees, for a model that has none."""
        self.validation_trees = self.test_trees = None
        self.final_report = False

    def check_sharded(self) -> None:
        """Refuse what the shards of FSDP do not allow."""
        if self.load_best_model_at_end:
            raise ValueError("load_best_model_at_end does not go with the shards of FSDP. Leave it out, or use DDP.")
        if self.validation_trees is not None:
            raise ValueError(
                "Trees cannot be evaluated on the shards of FSDP. Pass --validation_trees none and evaluate the "
                "saved model, or train with DDP."
            )

    def report_treebanks(self) -> dict[str, Treebank]:
        """Trees of the final report by treatment of punctuation; empty without a report."""
        if not self.final_report or self.test_trees is None:
            return {}
        return load_report_treebanks(self.test_trees, self.report_punctuation, self.max_tree_sentences)

    def methods(self) -> dict[str, dict[str, Any]]:
        """Options of `parse` by name of the kind of trees."""
        methods: dict[str, dict[str, Any]] = {"induced (inside)": {"method": "inside"}}
        if self.search_num_beams:
            methods[f"left to right (beam {self.search_num_beams})"] = {"num_beams": self.search_num_beams}
        return methods


# ---------------------------------------------------------------------------------------------- model
def make_config(arguments: GPSTModelArguments, tokenizer: PreTrainedTokenizerBase, context_length: int) -> GPSTConfig:
    """Make the configuration of an untrained model: preset, overrides, and what depends on tokenizer and data.

    Args:
        arguments: of the command line.
        tokenizer: whose special tokens and size the configuration takes over.
        context_length: longest context in tokens.

    Returns:
        The configuration.

    Raises:
        ValueError: an override is not a field, or a context is longer than the positions of the model.
    """
    overrides = check_overrides(GPSTConfig, arguments.config_overrides)
    config = GPSTConfig.from_preset(
        str(arguments.model_preset),
        **{**special_token_ids(tokenizer), "document_end_token": arguments.document_end_token, **overrides},
    )
    if context_length > config.max_position_embeddings:
        raise ValueError(
            f"context_length is {context_length} and max_position_embeddings only {config.max_position_embeddings}. "
            "Change one of the two."
        )
    return config


def make_model(
    arguments: GPSTModelArguments, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> PreTrainedModel:
    """Make an untrained model, or load the one to continue from.

    Args:
        arguments: of the command line.
        tokenizer: of the model.
        context_length: longest context in tokens.

    Returns:
        The model.

    Raises:
        ValueError: see `make_config`, `make_baseline` and `load_pretrained`.
    """
    if arguments.is_baseline:
        return make_baseline(arguments.architecture, arguments.config_overrides, tokenizer, context_length)
    if arguments.model_name_or_path is None:
        return GPSTForCausalLM(make_config(arguments, tokenizer, context_length))
    model = load_pretrained(GPSTForCausalLM, arguments.model_name_or_path, arguments.config_overrides, tokenizer)
    if arguments.document_end_token != model.config.document_end_token:
        raise ValueError(
            f"document_end_token is {arguments.document_end_token}, and {model.config.document_end_token} in the model "
            "of model_name_or_path. Give the model's value."
        )
    return model


# ---------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_losses(
    accelerator: Accelerator, model: nn.Module, contexts: ContextDataset, collate: Collate, batch_size: int
) -> dict[str, float]:
    """Mean validation losses in nats, without noise on the merge order and without dropout.

    Every part is a mean over its items in all contexts and does not depend on the batches. Losses of models that do not
    count their items are weighted by tokens. Every process takes its share of the batches and calls the model equally
    often.

    Args:
        accelerator: of the run. Every process has to call.
        model: prepared.
        contexts: validation text.
        collate: contexts -> batch.
        batch_size: contexts per process and call.

    Returns:
        "loss" and the names of its parts -> means.
    """
    starts = list(range(0, len(contexts), batch_size))
    rank, world = accelerator.process_index, accelerator.num_processes
    count_items = getattr(accelerator.unwrap_model(model), "count_loss_items", None) or _count_tokens

    def batches() -> Iterator[tuple[dict[str, Tensor], dict[str, int]]]:
        for index in range(rank, -(-len(starts) // world) * world, world):
            start = starts[index] if index < len(starts) else 0
            rows = [contexts[row] for row in range(start, min(start + batch_size, len(contexts)))]
            batch = collate(rows)
            counts = count_items(**batch)
            # A process without a batch of its own calls the model for nothing.
            yield batch, counts if index < len(starts) else dict.fromkeys(counts, 0)

    counted = [counts for _, counts in batches()]
    totals = torch.tensor([sum(counts[name] for counts in counted) for name in counted[0]], device=accelerator.device)
    by_name = dict(zip(counted[0], accelerator.reduce(totals, "sum").tolist(), strict=True))
    sums: dict[str, Tensor] = {}
    with evaluation_mode(model):
        for batch, counts in batches():
            shares, batch = to_shares(counts, by_name), to_device(batch, accelerator.device)
            if count_items is _count_tokens:
                loss, parts = model_loss(model, batch)
                loss = loss * shares["tokens"]
            else:
                loss, parts = model_loss(model, {**batch, "loss_shares": shares})
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = value.float() + sums.get(name, 0.0)
    values = accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()
    return dict(zip(sums, values, strict=True))


def _count_tokens(attention_mask: Tensor, **_: Tensor) -> dict[str, int]:
    """Items of the loss of a model that does not count them."""
    return {"tokens": int(attention_mask.sum())}


def _flat(result: dict[str, Any]) -> dict[str, float]:
    """Scalars of an evaluation by tracker name."""
    flat = {f"validation/{name}": value for name, value in result["losses"].items()}
    for name, scores in result.get("trees", {}).items():
        flat[f"validation_f1/{name}"] = scores["sentence_f1"]
    return flat


# ---------------------------------------------------------------------------------------------- the run
class GPSTRecipe(Recipe):
    """Pretrain GPST on contexts of raw text; treebanks are read for evaluation only."""

    program = "pretrain_gpst"
    argument_types = (GPSTModelArguments, DataArguments, EvaluationArguments, TrainingArguments)
    text: PreparedText
    contexts: ContextDataset
    validation: ContextDataset
    collate: Collate

    def __init__(
        self,
        accelerator: Accelerator,
        model_arguments: GPSTModelArguments,
        data: DataArguments,
        evaluation: EvaluationArguments,
        arguments: TrainingArguments,
    ):
        super().__init__(accelerator, arguments)
        self.model_arguments, self.data, self.evaluation = model_arguments, data, evaluation
        evaluation.complete(data)
        if model_arguments.is_baseline:
            evaluation.without_trees()
        if accelerator.distributed_type == DistributedType.FSDP:
            evaluation.check_sharded()
        self.treebank: Treebank | None = None
        self.report_treebanks: dict[str, Treebank] = {}

    def load(self) -> PreTrainedModel:
        """Prepare the text and its contexts, read the treebanks, make or load the model."""
        data, evaluation, seed = self.data, self.evaluation, self.arguments.seed
        self.arguments.limit_steps()
        if evaluation.validation_trees is not None:
            self.treebank = load_treebank(
                evaluation.validation_trees, evaluation.punctuation, evaluation.max_tree_sentences
            )
            self.baselines = score_baselines(self.treebank)
        self.report_treebanks = evaluation.report_treebanks()
        self.text = load_text(data, Path(self.arguments.output_dir), self.model_arguments.model_name_or_path)
        self.tokenizer = tokenizer = self.text.tokenizer
        end_id = tokenizer.eos_token_id if self.model_arguments.document_end_token else None
        self.contexts, self.validation = (
            load_contexts(data, corpus, end_id) for corpus in (self.text.train, self.text.validation)
        )
        self.collate = partial(collate_contexts, pad_token_id=tokenizer.pad_token_id)
        if self.model_arguments.is_baseline:
            self.collate = partial(
                collate_plain, pad_token_id=tokenizer.pad_token_id, begin_token_id=tokenizer.bos_token_id
            )
        self.accelerator.print(self.text.describe())
        for name in ("validation_trees", "test_trees"):
            self.accelerator.print(f"{name}: {getattr(evaluation, name) or f'none (--{name} names a treebank)'}")
        self.accelerator.print(
            f"training contexts: {self.contexts.describe()}\nvalidation contexts: {self.validation.describe()}"
        )
        set_seed(seed)  # the model does not depend on whether the text had been prepared before
        return make_model(self.model_arguments, tokenizer, data.context_length)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the contexts, and how the model is chosen."""
        return {
            "training_data": self.contexts.fingerprint(),
            "validation": self.validation.fingerprint(),
            "parser_learning_rate": self.model_arguments.parser_learning_rate,
            "load_best_model_at_end": self.evaluation.load_best_model_at_end,
        }

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """GPST's parser has its own."""
        rate = self.model_arguments.parser_learning_rate
        return {} if self.model_arguments.is_baseline or rate is None else {"parser": rate}

    def loader(self, run: Run) -> DataLoader:
        """Shuffled contexts."""
        return shuffled_loader(self.accelerator, self.contexts, self.collate, self.arguments, run.state.consumed)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure losses on validation text and F1 on validation trees."""
        batch_size = self.arguments.per_device_eval_batch_size
        losses = evaluate_losses(self.accelerator, model, self.validation, self.collate, batch_size)
        result: dict[str, Any] = {"step": step, "losses": losses}
        text = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self.accelerator.print(f"step {step}: validation text: {text}")
        if self.treebank is not None:
            plain = self.accelerator.unwrap_model(model)
            methods = self.evaluation.methods()
            trees = {kind: self._parse(plain, self.treebank, options) for kind, options in methods.items()}
            scores = {kind: score_trees(found, self.treebank) for kind, found in trees.items()}
            self.accelerator.print(score_table({**scores, **self.baselines}, self.treebank))
            result["trees"] = score_numbers({**scores, **self.baselines})
        self.accelerator.log(_flat(result), step=step)
        return result

    def _parse(self, model: PreTrainedModel, treebank: Treebank, options: dict[str, Any]) -> list[list[Span]]:
        """Best trees of the treebank's sentences; every process parses its share and gets all of them."""
        rank, world, words = self.accelerator.process_index, self.accelerator.num_processes, treebank.words
        own = parse_words(model, self.tokenizer, words[rank::world], **options)
        every = dict(gather_object(list(zip(range(rank, len(words), world), own, strict=True))))
        return [every[row] for row in range(len(words))]

    def best_model(self) -> BestModel | None:
        """The evaluation with the lowest validation loss, if it was asked for."""
        return BestModel(lambda result: result["losses"]["loss"]) if self.evaluation.load_best_model_at_end else None

    def flops_per_token(self, model: PreTrainedModel) -> float:
        """By the formula of the architecture."""
        if isinstance(model, GPSTForCausalLM):
            return gpst_flops_per_token(model.config, self.data.context_length)
        return decoder_flops_per_token(model, self.data.context_length)

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Names of the texts, steps and contexts."""
        return {
            **hub_facts(self.model_arguments.model_name_or_path, self.data.dataset_name),
            "training_data": f"{', '.join(self.text.train.source_names())}; no trees.",
            "training_procedure": f"{run.state.step} steps of `training/pretrain_gpst.py`, "
            f"{run.state.consumed} contexts of up to {self.data.context_length} tokens, seed {self.arguments.seed}.",
        }

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Number of contexts; treebanks are parsed in `report`."""
        return {"contexts": run.state.consumed}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse test trees with the saved model."""
        kept = kept_evaluation(results)
        line = f"validation loss {results['evaluations'][0]['losses']['loss']:.4f} -> {kept['losses']['loss']:.4f}"
        if self.report_treebanks:
            report = report_saved_model(
                folder, self.tokenizer, self.report_treebanks, self.evaluation.methods(), self.arguments.seed
            )
            results["test"] = report.numbers()
            line += f"; {report.summary()}"
        elif "trees" in kept:
            f1 = kept["trees"]
            line += (
                f"; validation sentence F1 {f1['induced (inside)']['sentence_f1']:.2f}, "
                f"right branching {f1['right']['sentence_f1']:.2f}"
            )
        return line


main = partial(run_recipe, GPSTRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
