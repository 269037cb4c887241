# SPDX-License-Identifier: Apache-2.0
"""Train any causal language model of transformers on a treebank with TreeReg, by `Trainer`.

    python training/train_treereg.py --config treereg_tiny --output-dir runs/treereg_tiny

The model is pretrained (`--model-name-or-path gpt2`), or new, with the architecture and tokenizer of a Hub name
(`--config-name`). All options of `transformers.TrainingArguments` work. `--treereg-weight 0` trains the same model on
the same sentences without the trees, `--trees random` and `--trees right` train the model on wrong trees. At the end,
the program measures perplexity and the F1 of the trees that TreeReg's score gives, on the validation sentences. Paper:
Nandi, Manning and Murty, "Sneaking Syntax into Transformer Language Models with Tree Regularization" (NAACL 2025).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_synlm.data.arguments import option
from hf_synlm.data.dependencies import DependencySentence
from hf_synlm.data.files import lock_output
from hf_synlm.data.samples import EMBEDDED
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.evaluation.trees.parsing import unlabeled_f1
from hf_synlm.hub.abilities import declared
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.training.arguments.base import parse_arguments
from hf_synlm.training.arguments.sentences import DependencyArguments, resolve_files
from hf_synlm.training.engine.run import make_baseline
from hf_synlm.training.tasks.treereg import (
    TreeRegArguments,
    TreeRegCollator,
    TreeRegTrainer,
    encode_sentence,
    greedy_parse,
)
from hf_synlm.trees.spans import right_branching

Sentence: TypeAlias = TreebankSentence | DependencySentence


@dataclass
class ModelAndDataArguments(DependencyArguments):
    """The model and the treebanks."""

    model_name_or_path: str | None = option(None, "Continue from the weights of this model, with its tokenizer.")
    config_name: str | None = option(None, "Train a new model of this architecture (a model type, such as gpt2).")
    config_overrides: str | None = option(
        None, "Fields of the configuration of a new model. Write key=value,key=value or a JSON object."
    )
    tokenizer_name: str | None = option(
        None, "Tokenizer of a new model, with an end token. By default, a tokenizer of word pieces is made."
    )
    tokenizer_vocab_size: int = option(2000, "Vocabulary size of the tokenizer of a new model.", minimum=1)
    train_files: list[str] = option([EMBEDDED], "Treebanks to train on (default: the embedded one).")
    validation_files: list[str] = option([EMBEDDED], "Treebanks for validation (default: the embedded one).")
    max_words: int = option(100, "Leave longer sentences out.", minimum=1)
    trees: Literal["gold", "random", "right"] = option(
        "gold",
        "Trees to train on. 'random' and 'right' are controls for the gold trees. 'random' takes trees of other "
        "sentences of the same length, and 'right' takes trees that branch to the right.",
    )

    def __post_init__(self):
        """Check the values, and name the files of the embedded treebank."""
        if self.model_name_or_path is None and self.config_name is None:
            raise ValueError("The model is missing. Pass --model-name-or-path, or --config-name for a new one.")
        resolve_files(self, train_files="trees.train.txt", validation_files="trees.valid.txt")

    def read(self, files: Sequence[str], read: Callable[..., Iterable[Sentence]]) -> list[Sentence]:
        """Sentences of some files; `read` takes a path and the options of dependencies."""
        found = (tree for path in files for tree in read(path, dependencies=self.dependencies))
        return [tree for tree in found if len(tree.words) <= self.max_words]

    def load(self, sentences: Sequence[Sentence]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model, and its tokenizer, which is made from the words of the sentences where it is not named."""
        if self.model_name_or_path is not None:
            return load_pretrained(self.model_name_or_path)
        if self.tokenizer_name is None:
            tokenizer = subword_tokenizer((tree.words for tree in sentences), self.tokenizer_vocab_size)
        else:
            check_tokenizer_source(self.tokenizer_name)
            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
            if tokenizer.eos_token is None:
                raise ValueError(
                    f"The tokenizer {self.tokenizer_name!r} has no eos_token. Set eos_token and save the tokenizer."
                )
        if tokenizer.bos_token is None:
            tokenizer.bos_token = tokenizer.eos_token
        return make_baseline(str(self.config_name), self.config_overrides, tokenizer), tokenizer


def control_trees(sentences: Sequence[Sentence], kind: str, seed: int) -> list[TreebankSentence]:
    """Sentences with other trees, "random" or "right".

    Of the sentences of one length, each gets the tree of another, in an order that is drawn: all trees stay, and few
    fit. A sentence whose length no other has gets a random binary tree.
    """
    gold = [sentence for sentence in sentences if isinstance(sentence, TreebankSentence)]
    if len(gold) < len(sentences):
        raise ValueError(f"--trees {kind} needs constituents. Pass --tree-structure flat, or leave --trees out.")
    draw, of_length = random.Random(seed), defaultdict[int, list[int]](list)
    for place, sentence in enumerate(gold):
        of_length[len(sentence.words)].append(place)
    found = list(gold)
    for length, places in of_length.items():
        draw.shuffle(places)
        for own, other in zip(places, [*places[1:], places[0]], strict=True):
            spans = right_branching(length) if kind == "right" else random_tree(length, draw) if own == other else None
            tree = gold[other].labeled_spans if spans is None else tuple(("X", i, j) for i, j in spans)
            found[own] = replace(gold[own], labeled_spans=tree)
    return found


def check_output_folder(arguments: TrainingArguments) -> None:
    """Raise ValueError if the output folder holds anything and no run is to be continued, or if a run writes it."""
    if arguments.process_index == 0:
        lock_output(arguments.output_dir)
    if arguments.resume_from_checkpoint is None and any(Path(arguments.output_dir).glob("*")):
        raise ValueError(
            f"Output folder {arguments.output_dir!r} is not empty. Choose another --output-dir, or continue with "
            "--resume-from-checkpoint FOLDER."
        )


def _check_states(model: str, name: str) -> None:
    """Raise ValueError for a model whose words are predicted by a beam of derivations, each with states of its own."""
    config = AutoConfig.from_pretrained(model)
    if declared(config, "searches") or config.model_type == "pcfg":
        raise ValueError(
            f"{name} needs a model with hidden states; {type(config).__name__.removesuffix('Config')} ({model}) has "
            "none, because it sums over derivations. Name another --model-name-or-path."
        )


def parse_batches(trainer: TreeRegTrainer, examples: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """Word spans of the trees of sentences (of `encode_sentence`) by the score of TreeReg."""
    trees, model = [], trainer.model.eval()
    for batch in trainer.get_eval_dataloader(examples):
        batch = {name: values.to(model.device) for name, values in batch.items()}
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        trees += [spans for spans, _ in greedy_parse(trainer.treereg.vectors(hidden), batch["word_spans"])]
    return trees


def prepare_training(
    argv: Sequence[str] | None,
    name: str,
    arguments_type: type,
    encode: Callable[[PreTrainedTokenizerBase, Any], dict[str, Any]],
    read: Callable[..., Iterable[Sentence]] = read_treebank,
) -> tuple[Any, dict[str, Any], int, list[Any]]:
    """Read the command line of a program that adds the loss `name` on trees, its treebanks, and its model.

    `arguments_type` has the options of the loss, `read` gives the sentences of a file, `encode` turns tokenizer and
    sentence into an example. Returns the options of the loss, those of `Trainer`, the padding of the batches, and the
    validation sentences.
    """
    types = (ModelAndDataArguments, arguments_type, TrainingArguments)
    data, method, arguments = parse_arguments(types, argv, f"Train a language model with {name}.")
    check_output_folder(arguments)
    if data.model_name_or_path is not None:
        _check_states(data.model_name_or_path, name)
    set_seed(arguments.seed)
    sentences = {
        "train_dataset": data.read(data.train_files, read),
        "eval_dataset": data.read(data.validation_files, read),
    }
    model, tokenizer = data.load(sentences["train_dataset"])
    if data.trees != "gold":
        sentences["train_dataset"] = control_trees(sentences["train_dataset"], data.trees, arguments.seed)
    examples = {part: [encode(tokenizer, tree) for tree in trees] for part, trees in sentences.items()}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    options = {"model": model, "args": arguments, "processing_class": tokenizer, **examples}
    return method, options, pad, sentences["eval_dataset"]


def train_and_measure(trainer: Trainer, measure: Callable[[], dict[str, float]]) -> None:
    """Train, save the model, and write its perplexity and what `measure` gives, numbers by name."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["eval_perplexity_per_token"] = perplexity_of(metrics["eval_loss"])
    metrics |= measure()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with a command line (default: the process's)."""
    treereg, options, pad, sentences = prepare_training(
        argv, "TreeReg", TreeRegArguments, lambda tokenizer, tree: encode_sentence(tokenizer, tree.words, tree.spans)
    )
    trainer = TreeRegTrainer(treereg=treereg, data_collator=TreeRegCollator(pad), **options)
    gold, lengths = [tree.spans for tree in sentences], [len(tree.words) for tree in sentences]

    def measure() -> dict[str, float]:
        found = parse_batches(trainer, options["eval_dataset"])
        return {"eval_f1": 100 * unlabeled_f1(found, gold, lengths).f1}

    train_and_measure(trainer, measure)


if __name__ == "__main__":
    main()
