# SPDX-License-Identifier: Apache-2.0
"""Pretrain GPST on raw text.

    accelerate launch training/pretrain_gpst.py --config gpst_tiny --output-dir runs/gpst_tiny

Text comes from files or from a data set of the Hub; if none is named, the embedded text is read. The text is split into
sentences, encoded, and packed into contexts of whole sentences; every sentence gets a tree of its own. No trees are
read for training. Treebanks only serve evaluation. `--architecture gpt2` trains a GPT-2 on the same contexts. Paper: Hu
et al., "Generative Pretrained Structured Transformers" (ACL 2024).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import collate_contexts
from hf_synlm.data.contexts import ContextDataset
from hf_synlm.data.files import flag_of
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.gold_treebank import Treebank, load_treebank, score_baselines
from hf_synlm.training.arguments.contexts import DataArguments, EvaluationArguments, GPSTModelArguments
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.final_report import REPORT_REMEDY, report_saved_model
from hf_synlm.training.engine.recipe import kept_evaluation
from hf_synlm.training.engine.run import Run, check_length, make_baseline, new_or_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.steps import model_loss, to_device, to_shares
from hf_synlm.training.programs.prepare_text import PreparedText, prepare
from hf_synlm.training.tasks.gpst_training import GPSTTraining

LARGE_TEXT = 100_000_000  # bytes, from which gpst-small is worth its time on a GPU
Collate = Callable[[list[Any]], dict[str, Any]]

# How often a token uses the weights of a module, where it is not once. Embeddings are looked up, and are the weights of
# two losses over the vocabulary. The type layers see about two slots per token. Of random merge orders and sentences of
# 24 tokens, a token has 4.21 compositions of two vectors; the gradients of the inside pass come in two channels.
USES = {
    "parser.embed_tokens": 0.0,
    "position_embedding": 0.0,
    "wpe": 0.0,
    "embed_tokens": 2.0,
    "type_layers": 2.0,
    "composition": 2 * 4.21 * 4 / 3,
    "decomposition": 2 * 4.21,
}


# ---------------------------------------------------------------------------------------------- model
def make_model(
    arguments: GPSTModelArguments, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> PreTrainedModel:
    """Make an untrained model for contexts of up to `context_length` tokens, or load the one to continue from."""
    if arguments.row.is_baseline:
        return make_baseline(arguments.architecture, arguments.config_overrides, tokenizer, context_length)
    special = arguments.row.model_class.config_class.from_tokenizer(tokenizer)
    names = ("vocab_size", *(f"{role}_token_id" for role in ("bos", "eos", "pad", "cls", "sep", "reduce")))
    defaults = {name: getattr(special, name) for name in names}
    defaults["document_end_token"] = arguments.document_end_token
    model = new_or_pretrained(arguments, tokenizer, {}, defaults)
    remedy = "Change it, or the sizes of the model."
    check_length(model.config, context_length, f"context_length {context_length}", remedy)
    if arguments.model_name_or_path and arguments.document_end_token != model.config.document_end_token:
        raise ValueError(
            f"--document-end-token is {arguments.document_end_token}, but it is {model.config.document_end_token} in "
            "the model of --model-name-or-path. Give the same value as the model."
        )
    return model


def collate_plain(rows: Sequence[Any], pad_token_id: int, begin_token_id: int) -> dict[str, Tensor]:
    """Collate contexts without the inputs that only GPST reads, each after the begin token: three tensors [B, T]."""
    batch = collate_contexts([{"input_ids": [begin_token_id, *row["input_ids"]]} for row in rows], pad_token_id)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


# ---------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_losses(
    accelerator: Accelerator, model: nn.Module, contexts: ContextDataset, collate: Collate, batch_size: int
) -> dict[str, float]:
    """Mean validation losses in nats, without noise on the merge order and without dropout; every process calls.

    Every part is a mean over its items in all contexts and does not depend on the batches. Losses of models that do not
    count their items are weighted by tokens. Every process takes its share of the batches and calls the model equally
    often.
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
    losses = dict(zip(sums, values, strict=True))
    # GPST's losses are given whole trees, which know the words to come: no perplexity.
    return losses | ({"perplexity": perplexity_of(losses["loss"])} if count_items is _count_tokens else {})


def _count_tokens(attention_mask: Tensor, **_: Tensor) -> dict[str, int]:
    """Items of the loss of a model that does not count them: the tokens that follow another one."""
    return {"tokens": int(attention_mask[:, 1:].sum())}


# ---------------------------------------------------------------------------------------------- the run
class GPSTRecipe(GPSTTraining):
    """Pretrain GPST on contexts of raw text; treebanks are read for evaluation only."""

    program = "pretrain_gpst"
    repeated = "parser_learning_rate load_best_model_at_end"
    score = "loss"
    model_arguments: GPSTModelArguments
    data: DataArguments
    evaluation: EvaluationArguments
    text: PreparedText
    examples: ContextDataset
    held_out: ContextDataset
    treebank: Treebank | None = None

    @classmethod
    def default_config(cls, device: str, *arguments: Any) -> str | None:
        """A small model, except on a GPU for a large text or a data set."""
        model, data, *_ = arguments
        if model.row.is_baseline or model.model_preset or model.config_overrides or model.model_name_or_path:
            return None
        size = sum(Path(path).stat().st_size for path in (*data.train_files, *data.train_trees))
        return None if device != "cpu" and (size >= LARGE_TEXT or not size) else "gpst_own_text"

    def check(self) -> None:
        """Settle the treebanks, and refuse what the shards of FSDP do not allow."""
        evaluation = self.evaluation
        evaluation.complete(self.data)
        if self.model_arguments.row.is_baseline:  # it has no trees
            evaluation.validation_trees = evaluation.test_trees = None
        if self.best_model() is not None:
            self.needs_whole = "load_best_model_at_end or early_stopping_patience"
        elif evaluation.validation_trees is not None:
            self.needs_whole = "the evaluation of --validation-trees ('none': none)"
        super().check()

    def load(self) -> PreTrainedModel:
        """Prepare the text and its contexts, read the treebanks, make or load the model."""
        data, evaluation, output_dir = self.data, self.evaluation, Path(self.arguments.output_dir)
        if evaluation.validation_trees is not None:
            self.treebank = load_treebank(
                evaluation.validation_trees, evaluation.punctuation, evaluation.max_tree_sentences
            )
            self.baselines = score_baselines(self.treebank)
        report = evaluation.test_trees if evaluation.final_report else None
        if evaluation.final_report and report is None:
            self.accelerator.print("--final-report: there is none without --test-trees")
        self.report_treebanks = {
            name: load_treebank(report, name, evaluation.max_tree_sentences, remedy=REPORT_REMEDY)
            for name in evaluation.report_punctuation
            if report is not None
        }
        data.tokenizer_name = data.tokenizer_name or self.model_arguments.model_name_or_path
        self.text = prepare(data, data.prepared or output_dir / "text", verify=data.verify_prepared)
        self.text_style = "no-punctuation" if self.text.train.made_from["text"]["drop_punctuation"] else None
        self.tokenizer = tokenizer = self.text.tokenizer
        end_id = tokenizer.eos_token_id if self.model_arguments.document_end_token else None
        cut: Any = {"max_sentence_tokens": data.max_sentence_tokens, "with_word_ends": data.keep_words_together}
        self.examples, self.held_out = (
            ContextDataset(corpus, data.context_length, end_of_document_id=end_id, **cut)
            for corpus in (self.text.train, self.text.validation)
        )
        self.collate = partial(collate_contexts, pad_token_id=tokenizer.pad_token_id)
        if self.model_arguments.row.is_baseline:
            ids = {"pad_token_id": tokenizer.pad_token_id, "begin_token_id": tokenizer.bos_token_id}
            self.collate = partial(collate_plain, **ids)
        self.accelerator.print(self.text.describe())
        for name in ("validation_trees", "test_trees"):
            self.accelerator.print(f"{name}: {getattr(evaluation, name) or f'none ({flag_of(name)} names a treebank)'}")
        self.accelerator.print(
            f"training contexts: {self.examples.describe()}\nvalidation contexts: {self.held_out.describe()}"
        )
        set_seed(self.arguments.seed)  # the model does not depend on whether the text had been prepared before
        return make_model(self.model_arguments, tokenizer, data.context_length)

    def flops_per_token(self, model: PreTrainedModel) -> float:
        """6 for every use of a weight, and 12 D T for the attention of a layer (Chowdhery et al. 2022, appendix B)."""
        config, is_gpst = model.config, model.config.model_type == "gpst"
        used = 0.0
        for name, parameter in model.named_parameters():
            uses = next((uses for module, uses in USES.items() if f".{module}." in f".{name}"), 1.0)
            used += parameter.numel() * uses
        layers = config.num_token_layers + 4 * config.num_type_layers if is_gpst else config.num_hidden_layers
        return 6 * used + 12 * layers * config.hidden_size * self.data.context_length

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure losses on validation text and F1 on validation trees."""
        batch_size = self.arguments.per_device_eval_batch_size
        losses = evaluate_losses(self.accelerator, model, self.held_out, self.collate, batch_size)
        result: dict[str, Any] = {"step": step, "losses": losses}
        self.tell(step, "validation", " text", losses, ".4f")
        if self.treebank is not None:
            scores = self.score_methods(model, self.treebank, self.evaluation.methods()) | self.baselines
            result["trees"] = self.tell_trees(scores, self.treebank, step)
        return result

    def best_model(self) -> BestModel | None:
        """The evaluation with the lowest validation loss, if it was asked for."""
        patience = self.arguments.early_stopping_patience
        if not (self.evaluation.load_best_model_at_end or patience):
            return None
        return BestModel(lambda result: result["losses"]["loss"], patience)

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

    def improvement(self, results: dict[str, Any]) -> str:
        """The closing line, with the perplexity of the validation text or how to get it."""
        losses, folder = kept_evaluation(results)["losses"], Path(self.arguments.output_dir) / "model"
        if "perplexity" in losses:
            return f"{super().improvement(results)}; perplexity of a token {losses['perplexity']:.2f}"
        return f"{super().improvement(results)} (its perplexity: synlm evaluate perplexity FILE --model {folder})"

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Parse test trees with the saved model."""
        if self.report_treebanks:
            methods = self.evaluation.methods()
            banks, seed = self.report_treebanks, self.arguments.seed
            results["test"] = report_saved_model(folder, banks, methods, seed, "gpst", None)


main = partial(run_recipe, GPSTRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
