"""Pretrain GPST on raw text.

    accelerate launch training/pretrain_gpst.py --config training/configs/gpst_tiny.yaml --output_dir runs/gpst_tiny

Text comes from files, from a data set of the Hub, or (default) from the embedded corpus. It is split into sentences,
encoded, and packed into contexts of whole sentences; every sentence gets a tree of its own. No trees are read for
training: treebanks only serve evaluation. `--architecture gpt2` trains a GPT-2 on the same contexts.
Paper: Hu et al., "Generative Pretrained Structured Transformers" (ACL 2024).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.collate import collate_contexts
from hf_synlm.data.contexts import ContextDataset
from hf_synlm.data.prepare import PreparedText
from hf_synlm.data.samples import sample_path
from hf_synlm.data.shards import PreparedCorpus
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
from hf_synlm.hub.checkpoint import check_model_source
from hf_synlm.losses import to_shares
from hf_synlm.training.arguments import TrainingArguments, check_overrides, parse_arguments
from hf_synlm.training.baseline_model import collate_plain, decoder_flops_per_token, make_baseline
from hf_synlm.training.best_model import BestModel
from hf_synlm.training.checkpoints import TrainingState, read_state, write_json
from hf_synlm.training.final_report import load_report_treebanks, report_saved_model
from hf_synlm.training.flops import gpst_flops_per_token
from hf_synlm.training.generation_samples import SampleGenerator
from hf_synlm.training.hub_uploads import CheckpointUploads, push_final_model
from hf_synlm.training.loop import start_or_resume, train
from hf_synlm.training.optimizers import make_optimizer
from hf_synlm.training.output_folder import RESULTS_FILE, output_folder
from hf_synlm.training.preflight import preflight
from hf_synlm.training.run import (
    Run,
    course_settings,
    end_run,
    load_pretrained,
    make_accelerator,
    save_final_model,
    set_up_layers,
    start_tracking,
)
from hf_synlm.training.samplers import StepSampler, make_loader
from hf_synlm.training.steps import to_device
from hf_synlm.training.text_contexts import DataArguments, load_contexts, load_text
from hf_synlm.trees import Span

Collate = Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]


@dataclass
class ModelArguments:
    """The model to train."""

    architecture: str = field(
        default="gpst",
        metadata={
            "help": "gpst; or, as a baseline without trees, a causal language model of transformers by its model type, "
            "such as gpt2. The options about trees and the preset are GPST's alone."
        },
    )
    model_preset: str = field(default="gpst-small", metadata={"help": "Published size to start from."})
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of the configuration that differ from the preset (of a baseline: from the defaults): "
            "key=value,key=value or a JSON object; in a config file a mapping.",
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Continue from the weights and configuration of this model instead."}
    )
    document_end_token: bool = field(
        default=False,
        metadata={"help": "End every document with the end token, so that the model learns when to stop."},
    )
    parser_learning_rate: float | None = field(
        default=1e-3, metadata={"help": "Peak learning rate of the parser, which gives the merge order."}
    )

    def __post_init__(self):
        """Check that a baseline begins afresh, and that there is the model to continue from."""
        if self.is_baseline and self.model_name_or_path is not None:
            raise ValueError(
                f"model_name_or_path {self.model_name_or_path!r} is for GPST; a {self.architecture} is trained from "
                "the beginning. Leave one of them out."
            )
        if self.model_name_or_path is not None:
            check_model_source(self.model_name_or_path)

    @property
    def is_baseline(self) -> bool:
        """Whether the model is one of transformers."""
        return self.architecture != "gpst"

    def learning_rates(self) -> dict[str, float]:
        """Modules with a learning rate of their own."""
        if self.is_baseline or self.parser_learning_rate is None:
            return {}
        return {"parser": self.parser_learning_rate}


@dataclass
class EvaluationArguments:
    """What is measured during training and at its end."""

    validation_trees: str | None = field(
        default="embedded", metadata={"help": "Treebank file for F1 during training; 'embedded', or 'none'."}
    )
    test_trees: str | None = field(
        default="embedded", metadata={"help": "Treebank file for the final report; 'embedded', or 'none'."}
    )
    punctuation: str = field(
        default="remove",
        metadata={"help": "Punctuation in treebanks: remove it before parsing, ignore it in the score, or keep it."},
    )
    report_punctuation: list[str] = field(
        default_factory=lambda: ["remove", "keep"],
        metadata={"help": "Treatments of punctuation that the final report scores, each with its own baselines."},
    )
    max_tree_sentences: int | None = field(default=None, metadata={"help": "Read only so many trees of a treebank."})
    search_num_beams: int = field(
        default=20, metadata={"help": "Beam of left-to-right parsing in evaluation; 0 leaves it out."}
    )
    load_best_model_at_end: bool = field(
        default=False,
        metadata={"help": "Keep the weights of the best validation loss, and save them as the final model."},
    )
    final_report: bool = field(
        default=False,
        metadata={"help": "At the end, load the saved model in a process without hf_synlm; parse and generate there."},
    )

    def __post_init__(self):
        """Resolve the names of the embedded treebanks."""
        for name, embedded in (("validation_trees", "trees.valid.txt"), ("test_trees", "trees.test.txt")):
            value = getattr(self, name)
            if value == "embedded":
                setattr(self, name, str(sample_path(embedded)))
            elif value in ("none", ""):
                setattr(self, name, None)
        for value in (self.punctuation, *self.report_punctuation):
            if value not in PUNCTUATION:
                raise ValueError(f"punctuation {value!r} is unknown. Choose among {', '.join(PUNCTUATION)}.")
        if self.search_num_beams < 0:
            raise ValueError(f"search_num_beams must not be negative and is {self.search_num_beams}.")

    def without_trees(self) -> None:
        """Leave out what a model without trees cannot be asked."""
        self.validation_trees = self.test_trees = None
        self.final_report = False

    def report_treebanks(self) -> dict[str, Treebank]:
        """Trees of the final report by treatment of punctuation; empty without a report."""
        if not self.final_report or self.test_trees is None:
            return {}
        return load_report_treebanks(self.test_trees, self.report_punctuation, self.max_tree_sentences)

    def methods(self) -> dict[str, dict[str, Any]]:
        """Kinds of trees that are scored, with their options of `parse`."""
        methods: dict[str, dict[str, Any]] = {"induced (inside)": {"method": "inside"}}
        if self.search_num_beams:
            methods[f"left to right (beam {self.search_num_beams})"] = {"num_beams": self.search_num_beams}
        return methods


# ---------------------------------------------------------------------------------------------- model
def make_config(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, context_length: int) -> GPSTConfig:
    """Configuration of the model: preset, overrides, and what depends on tokenizer and data.

    Args:
        arguments: of the command line.
        tokenizer: whose special tokens and size the configuration takes over.
        context_length: longest context in tokens.

    Returns:
        The configuration.

    Raises:
        ValueError: for overrides that are no fields of `GPSTConfig`, or positions that do not hold a context.
    """
    overrides = check_overrides(GPSTConfig, arguments.config_overrides)
    config = GPSTConfig.from_preset(
        arguments.model_preset,
        **{**special_token_ids(tokenizer), "document_end_token": arguments.document_end_token, **overrides},
    )
    if context_length > config.max_position_embeddings:
        raise ValueError(
            f"context_length {context_length} needs max_position_embeddings of at least as many, and "
            f"it is {config.max_position_embeddings}. Change one of the two."
        )
    return config


def make_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, context_length: int) -> PreTrainedModel:
    """A fresh model, or the one to continue from, checked against the tokenizer."""
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


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of a micro batch and its detached parts, if it has some."""
    output = model(**batch)
    return output.loss, dict(getattr(output, "losses", None) or {})


# ---------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_losses(
    accelerator: Accelerator, model: nn.Module, contexts: ContextDataset, collate: Collate, batch_size: int
) -> dict[str, float]:
    """Mean validation losses in nats, without noise on the merge order and without dropout.

    Every part is a mean over its items in all contexts, whatever the batches. Models that do not count their items are
    weighted by tokens. Every process takes its share of the batches and calls the model equally often.

    Args:
        accelerator: of the run. Every process has to call.
        model: prepared.
        contexts: validation text.
        collate: contexts -> batch.
        batch_size: contexts per process and call.

    Returns:
        "loss" and the names of its parts -> means.
    """
    model.eval()
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
    for batch, counts in batches():
        shares, batch = to_shares(counts, by_name), to_device(batch, accelerator.device)
        if count_items is _count_tokens:
            loss, parts = compute_loss(model, batch)
            loss = loss * shares["tokens"]
        else:
            loss, parts = compute_loss(model, {**batch, "loss_shares": shares})
        for name, value in {"loss": loss, **parts}.items():
            sums[name] = value.float() + sums.get(name, 0.0)
    values = accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()
    model.train()
    return dict(zip(sums, values, strict=True))


def _count_tokens(attention_mask: Tensor, **_: Tensor) -> dict[str, int]:
    """Items of the loss of a model that does not count them."""
    return {"tokens": int(attention_mask.sum())}


class Evaluator:
    """Measures losses on validation text and F1 on validation trees, and keeps what it measured."""

    def __init__(
        self,
        accelerator: Accelerator,
        arguments: EvaluationArguments,
        tokenizer: PreTrainedTokenizerBase,
        contexts: ContextDataset,
        collate: Collate,
        batch_size: int,
    ):
        self.accelerator, self.arguments, self.tokenizer = accelerator, arguments, tokenizer
        self.contexts, self.collate, self.batch_size = contexts, collate, batch_size
        self.treebank: Treebank | None = None
        if arguments.load_best_model_at_end and accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("load_best_model_at_end does not go with the shards of FSDP. Leave it out, or use DDP.")
        if arguments.validation_trees is not None:
            if accelerator.distributed_type == DistributedType.FSDP:
                raise ValueError(
                    "Trees cannot be evaluated on the shards of FSDP. Pass --validation_trees none and evaluate the "
                    "saved model, or train with DDP."
                )
            self.treebank = load_treebank(
                arguments.validation_trees, arguments.punctuation, arguments.max_tree_sentences
            )
            self.baselines = score_baselines(self.treebank)

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate; the main process prints the result. Every process has to call."""
        losses = evaluate_losses(self.accelerator, model, self.contexts, self.collate, self.batch_size)
        result: dict[str, Any] = {"step": step, "losses": losses}
        text = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self.accelerator.print(f"step {step}: validation text: {text}")
        if self.treebank is not None:
            plain = self.accelerator.unwrap_model(model)
            trees = {kind: self._parse(plain, options) for kind, options in self.arguments.methods().items()}
            scores = {kind: score_trees(found, self.treebank) for kind, found in trees.items()}
            self.accelerator.print(score_table({**scores, **self.baselines}, self.treebank))
            result["trees"] = score_numbers({**scores, **self.baselines})
        self.accelerator.log(_flat(result), step=step)
        return result

    def _parse(self, model: PreTrainedModel, options: dict[str, Any]) -> list[list[Span]]:
        """Best trees of the treebank's sentences; every process parses its share and gets all of them."""
        rank, world, words = self.accelerator.process_index, self.accelerator.num_processes, self.treebank.words
        own = parse_words(model, self.tokenizer, words[rank::world], **options)
        every = dict(gather_object(list(zip(range(rank, len(words), world), own, strict=True))))
        return [every[row] for row in range(len(words))]


def _flat(result: dict[str, Any]) -> dict[str, float]:
    """Scalars of an evaluation by tracker name."""
    flat = {f"validation/{name}": value for name, value in result["losses"].items()}
    for name, scores in result.get("trees", {}).items():
        flat[f"validation_f1/{name}"] = scores["sentence_f1"]
    return flat


# ---------------------------------------------------------------------------------------------- the run
def flops_per_token(model: PreTrainedModel, context_length: int) -> float:
    """FLOPs of training per token, by formula."""
    if isinstance(model, GPSTForCausalLM):
        return gpst_flops_per_token(model.config, context_length)
    return decoder_flops_per_token(model, context_length)


def card_facts(run: Run, data: DataArguments, text: PreparedCorpus) -> dict[str, Any]:
    """What the card of the final model states about this run."""
    return {
        "training_data": f"{', '.join(text.source_names())}; no trees.",
        "training_procedure": f"{run.state.step} steps of `training/pretrain_gpst.py`, "
        f"{run.state.consumed} contexts of up to {data.context_length} tokens, seed {run.arguments.seed}.",
    }


def report_results(
    run: Run,
    folder: Path,
    results: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    treebanks: dict[str, Treebank],
    evaluation: EvaluationArguments,
) -> None:
    """Measure the saved model on test trees, add that to `all_results.json`, and print the closing line."""
    evaluations = results["evaluations"]
    kept_step = results.get("best_step", results["step"])
    before, kept = evaluations[0], next(item for item in evaluations if item["step"] == kept_step)
    line = f"validation loss {before['losses']['loss']:.4f} -> {kept['losses']['loss']:.4f}"
    if treebanks:
        report = report_saved_model(folder, tokenizer, treebanks, evaluation.methods(), run.arguments.seed)
        write_json(run.output_dir / RESULTS_FILE, {**results, "test": report.numbers()})
        line += f"; {report.summary()}"
    elif "trees" in kept:
        f1 = kept["trees"]
        line += (
            f"; validation sentence F1 {f1['induced (inside)']['sentence_f1']:.2f}, "
            f"right branching {f1['right']['sentence_f1']:.2f}"
        )
    print(line)


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    model_arguments, data, evaluation, arguments = parse_arguments(
        (ModelArguments, DataArguments, EvaluationArguments, TrainingArguments), argv, mappings=["config_overrides"]
    )
    started = time.monotonic()
    arguments.limit_steps()
    accelerator = make_accelerator(arguments)
    if model_arguments.is_baseline:
        evaluation.without_trees()
    with output_folder(accelerator, arguments, model_arguments, data, evaluation) as checkpoint:
        set_seed(arguments.seed)
        text = load_text(data, Path(arguments.output_dir), model_arguments.model_name_or_path)
        tokenizer = text.tokenizer
        end_id = tokenizer.eos_token_id if model_arguments.document_end_token else None
        contexts, validation = (load_contexts(data, corpus, end_id) for corpus in (text.train, text.validation))
        accelerator.print(text.describe())
        accelerator.print(f"training contexts: {contexts.describe()}\nvalidation contexts: {validation.describe()}")

        set_seed(arguments.seed)
        model = make_model(model_arguments, tokenizer, data.context_length)
        accelerator.print(f"model: {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}")
        set_up_layers(model, arguments)
        optimizer, schedule = make_optimizer(model, arguments, model_arguments.learning_rates())
        settings = course_settings(arguments, model.config, contexts.fingerprint(), accelerator, tokenizer)
        settings.update(
            parser_learning_rate=model_arguments.parser_learning_rate,
            validation=validation.fingerprint(),
            load_best_model_at_end=evaluation.load_best_model_at_end,
        )
        if checkpoint is not None:
            read_state(checkpoint, settings)  # refuses other settings
        preflight(accelerator, arguments, model)
        run = Run(accelerator, arguments, *accelerator.prepare(model, optimizer, schedule), TrainingState())
        collate = partial(collate_contexts, pad_token_id=tokenizer.pad_token_id)
        if model_arguments.is_baseline:
            collate = partial(collate_plain, **collate.keywords, begin_token_id=tokenizer.bos_token_id)
        batch_size = arguments.per_device_eval_batch_size
        evaluator = Evaluator(accelerator, evaluation, tokenizer, validation, collate, batch_size)
        treebanks = evaluation.report_treebanks()
    start_tracking(accelerator, "pretrain_gpst", model_arguments, data, evaluation, arguments)
    folder, results = run_training(run, checkpoint, settings, contexts, evaluator, data, evaluation, text, started)
    # What follows takes one process: the others need not wait for it.
    end_run(run)
    if accelerator.is_main_process:
        report_results(run, folder, results, tokenizer, treebanks, evaluation)
    push_final_model(run)


def run_training(
    run: Run,
    checkpoint: Path | None,
    settings: dict[str, Any],
    contexts: ContextDataset,
    evaluator: Evaluator,
    data: DataArguments,
    evaluation: EvaluationArguments,
    text: PreparedText,
    started: float,
) -> tuple[Path, dict[str, Any]]:
    """Train, save the model and write the results; returns the folder of the model and the results."""
    accelerator, arguments, tokenizer = run.accelerator, run.arguments, text.tokenizer
    best = BestModel(lambda result: result["losses"]["loss"], 0) if evaluation.load_best_model_at_end else None
    generator = SampleGenerator(run, tokenizer)
    uploads = CheckpointUploads(run, tokenizer, lambda: card_facts(run, data, text.train))
    start_or_resume(run, checkpoint, settings, evaluator.run, best)
    sampler = StepSampler(
        len(contexts),
        arguments.per_device_train_batch_size,
        arguments.seed,
        accelerator.process_index,
        accelerator.num_processes,
        run.state.consumed,
    )
    loader = make_loader(accelerator, contexts, evaluator.collate, arguments, sampler)
    speed = train(
        run, loader, compute_loss, evaluator.run, best, generate=generator, after_checkpoint=uploads,
        flops_per_token=flops_per_token(accelerator.unwrap_model(run.model), data.context_length),
    )  # fmt: skip
    uploads.finish()
    if best is not None:
        accelerator.print(f"the best model is that of step {best.restore(run)}")
    folder = save_final_model(run, tokenizer, card_facts(run, data, text.train))
    results = {
        "step": run.state.step,
        "contexts": run.state.consumed,
        "seconds_of_this_process": round(time.monotonic() - started, 1),
        **speed,
        **({} if best is None else {"best_step": run.state.notes["best"]["step"]}),
        "train": run.state.notes.get("train", []),
        "evaluations": run.state.notes["evaluations"],
    }
    if accelerator.is_main_process:
        write_json(run.output_dir / RESULTS_FILE, results)
    return folder, results


if __name__ == "__main__":
    main()
