# SPDX-License-Identifier: Apache-2.0
"""Continue to train GPST on the sentences of a treebank, without its trees, and score the trees that it induces.

    accelerate launch training/finetune_grammar_induction.py --config induction_ptb \
        --model-name-or-path runs/gpst_small_wikitext103/model --output-dir runs/gpst_induction

Every sentence is a separate context, and word pieces stay together. Trees come from the inside pass, from left-to-right
parsing with and without word synchronization, and from the parser's merges; the scores stand beside those of baseline
trees. The final model is the one with the best F1 on the validation trees.
Paper: Hu et al., "Generative Pretrained Structured Transformers" (ACL 2024), section 4.3.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.arguments import option
from hf_synlm.data.collate import collate_contexts, encode_words
from hf_synlm.data.files import flag_of
from hf_synlm.data.punctuation import is_punctuation
from hf_synlm.data.samples import EMBEDDED, resolve_embedded
from hf_synlm.data.text import plural, read_lines
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.trees.gold_treebank import (
    Treebank,
    load_treebank,
    score_baselines,
    score_numbers,
    score_table,
    score_trees,
)
from hf_synlm.evaluation.trees.parsing import ParsingScores, resolve_convention
from hf_synlm.training.engine.arguments import check_minimum
from hf_synlm.training.engine.recipe import kept_evaluation
from hf_synlm.training.engine.run import Run
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.tasks.example_tables import ExampleDataset
from hf_synlm.training.tasks.finetuning import (
    FineTuning,
    check_length,
    load_model,
    mean_losses,
    read_config,
    read_tokenizer,
)
from hf_synlm.training.tasks.sentence_files import check_files
from hf_synlm.training.tasks.tree_evaluation import parse_together

# Tree type -> (its name in tables, options of `parse`); `num_beams` is filled in.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "inside": ("inside", {"method": "inside"}),
    "generative": ("left to right", {"num_beams": 0}),
    "generative_nosync": ("left to right w/o sync", {"num_beams": 0, "synchronous": False}),
    "parser": ("merges of the parser", {"method": "merge_order"}),
}


@dataclass
class InductionArguments:
    """Sentences to train on, treebanks to evaluate on, and which trees are scored."""

    train_trees: list[str] = option(
        [], "Treebank files whose words are trained on, or 'embedded', which is the default if no file is named."
    )
    train_files: list[str] = option([], "Text files: one sentence per line, words separated by white space.")
    validation_trees: str = option("", "Treebank file that chooses the best model, or 'embedded'.")
    test_trees: str = option("", "Treebank file of the final scores, or 'embedded'.")
    punctuation: Literal["remove", "ignore", "keep"] = option(
        "remove", "Remove it before training and parsing (paper), ignore it in the score only, or keep it."
    )
    lowercase: bool = option(True, "Lower-case all words, as in the paper.")
    max_sentence_tokens: int | None = option(None, "Leave longer training sentences out.")
    max_tree_sentences: int | None = option(None, "Read only this many trees of a treebank.")
    max_tree_words: int | None = option(None, "Leave longer sentences out of the scored treebanks (WSJ10: 10).")
    methods: list[str] = option(list(METHODS), f"Tree types to score at the end: {', '.join(METHODS)}.")
    selection_method: str = option(
        "inside", "Tree type scored during training; its sentence F1 chooses the best model."
    )
    search_num_beams: int = option(20, "Beam of left-to-right parsing.")

    def __post_init__(self):
        """Resolve the names of the embedded treebanks and check the values."""
        if not any((self.train_trees, self.train_files, self.validation_trees, self.test_trees)):
            self.train_trees, self.validation_trees, self.test_trees = [EMBEDDED], EMBEDDED, EMBEDDED
        if not self.train_trees and not self.train_files:
            raise ValueError("No training sentences are named. Pass --train-trees or --train-files.")
        for name in ("validation_trees", "test_trees"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set. Pass {flag_of(name)} with a treebank, or 'embedded'.")
        self.train_trees = [resolve_embedded(name, "trees.train.txt") for name in self.train_trees]
        self.validation_trees = resolve_embedded(self.validation_trees, "trees.valid.txt")
        self.test_trees = resolve_embedded(self.test_trees, "trees.test.txt")
        check_files(*self.train_trees, *self.train_files, self.validation_trees, self.test_trees)
        for name in (*self.methods, self.selection_method):
            if name not in METHODS:
                raise ValueError(f"Unknown tree type {name!r}. Choose among {', '.join(METHODS)}.")
        check_minimum(self, 1, "search_num_beams max_sentence_tokens max_tree_sentences max_tree_words")

    def method(self, name: str) -> tuple[str, dict[str, Any]]:
        """Name of the tree type `name` in tables, and its options of `parse`."""
        label, options = METHODS[name]
        if "num_beams" not in options:
            return label, options
        return f"{label} (beam {self.search_num_beams})", {**options, "num_beams": self.search_num_beams}

    def treebank(self, path: str) -> Treebank:
        """The treebank at `path`, as it is trained on and scored."""
        treebank = load_treebank(path, self.punctuation, self.max_tree_sentences)
        if self.max_tree_words is not None:
            short = resolve_convention("gpst", max_length=self.max_tree_words)
            treebank = treebank.select(treebank.numbers_scored(short))
        if not self.lowercase:
            return treebank
        sentences = [
            dataclasses.replace(sentence, words=tuple(map(str.lower, sentence.words)))
            for sentence in treebank.sentences
        ]
        return dataclasses.replace(treebank, sentences=sentences, convention=f"{treebank.convention}; lower case")

    def sentences(self) -> Iterator[list[str]]:
        """Words of the training sentences."""
        for path in self.train_trees:
            yield from dataclasses.replace(self, max_tree_sentences=None, max_tree_words=None).treebank(path).words
        for path in self.train_files:
            for line in read_lines(path):
                words = line.lower().split() if self.lowercase else line.split()
                if self.punctuation == "remove":
                    words = [word for word in words if not is_punctuation(word)]
                if words:
                    yield words

    def describe_sources(self) -> list[dict[str, Any]]:
        """Role, path, size and checksum of every file."""
        files = {name: getattr(self, name) for name in ("train_trees", "train_files")}
        files |= {name: [getattr(self, name)] for name in ("validation_trees", "test_trees")}
        return [{"role": role, **found} for role, paths in files.items() for found in describe_files(paths)]

    def describe(self) -> str:
        """One sentence for the model card."""
        names = [*(f"the words of {Path(path).name}" for path in self.train_trees), *map(str, self.train_files)]
        return f"{', '.join(names)}; no trees. The best model was chosen on the trees of {self.validation_trees}."


# ---------------------------------------------------------------------------------------------- examples
def encode_sentences(
    sentences: list[list[str]], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> ExampleDataset:
    """Encode sentences as contexts with `input_ids` and `word_ends`; those of more than `max_tokens` are left out."""
    encoded = [encode_words(tokenizer, words) for words in sentences]
    kept = [(ids, ends) for ids, ends in encoded if max_tokens is None or len(ids) <= max_tokens]
    return ExampleDataset(Dataset.from_dict({"input_ids": [i for i, _ in kept], "word_ends": [e for _, e in kept]}))


# ---------------------------------------------------------------------------------------------- the run
class InductionRecipe(FineTuning):
    """GPST on single sentences; the trees that it induces are scored."""

    program = "finetune_grammar_induction"
    data: InductionArguments
    treebanks: dict[str, Treebank]
    held_out: ExampleDataset

    def load(self) -> PreTrainedModel:
        """Read and encode the sentences, load the model."""
        data, accelerator = self.data, self.accelerator
        self.treebanks = {"validation": data.treebank(data.validation_trees), "test": data.treebank(data.test_trees)}
        self.baselines = {part: score_baselines(treebank) for part, treebank in self.treebanks.items()}
        self.sources = data.describe_sources()
        model = self._load_gpst()
        self.collate = partial(collate_contexts, pad_token_id=self.tokenizer.pad_token_id)
        self.examples = encode_sentences(list(data.sentences()), self.tokenizer, data.max_sentence_tokens)
        encoded = {part: encode_sentences(bank.words, self.tokenizer, None) for part, bank in self.treebanks.items()}
        for part, sentences in {"training": self.examples, **encoded}.items():
            remedy = f"Lower --{'max-sentence-tokens' if part == 'training' else 'max-tree-words'}."
            check_length(model.config, max(sentences.lengths), f"The longest {part} sentence", remedy)
        self.held_out = encoded["validation"]
        names = ", ".join((*data.train_trees, *data.train_files))
        accelerator.print(f"train data ({names}): {self.examples.describe()}")
        for part, path in (("validation", data.validation_trees), ("test", data.test_trees)):
            accelerator.print(f"{part} data ({path}): {plural(len(self.treebanks[part].words), 'sentence')}")
        return model

    def _load_gpst(self) -> PreTrainedModel:
        """The pretrained GPST, with the ablations of `config_overrides`."""
        arguments = self.model_arguments
        config = read_config(arguments)
        if config.model_type != "gpst":
            raise ValueError(
                f"{arguments.model_name_or_path} is a {config.model_type}, and this program fine-tunes GPST. Use "
                "train_recurrent.py to train and score the trees of ON-LSTM, PRPN and PaLM."
            )
        self.tokenizer = read_tokenizer(arguments, config, [])
        return load_model(AutoModelForCausalLM, arguments, config, self.tokenizer)

    def fingerprints(self) -> tuple[str, str]:
        """Of the sentences."""
        return self.examples.fingerprint(), self.held_out.fingerprint()

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Data, and the choice of the best model."""
        selection = self.data.method(self.data.selection_method)
        return {**super().settings(model), "selection": selection}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure the objective on validation sentences, and F1 of induced trees."""
        batch_size = self.arguments.per_device_eval_batch_size
        losses = mean_losses(self.accelerator, model, self.held_out, self.collate, batch_size)
        scores = self._score(model, "validation", [self.data.selection_method])
        self.tell(step, "validation", f", {plural(len(self.held_out), 'sentence')}", losses, ".4f")
        self.accelerator.print(score_table(scores, self.treebanks["validation"]))
        trees = score_numbers(scores)
        flat = {f"validation_f1/{name}": value["sentence_f1"] for name, value in trees.items()}
        self.accelerator.log(flat, step=step)
        return {"step": step, "losses": losses, "trees": trees}

    def _score(self, model: nn.Module, part: str, methods: list[str]) -> dict[str, ParsingScores]:
        """Scores of several tree types and of the baselines; the processes share the sentences."""
        treebank, scores = self.treebanks[part], {}
        size = self.arguments.per_device_eval_batch_size
        for label, options in map(self.data.method, methods):
            trees = parse_together(self.accelerator, model, self.tokenizer, treebank, size, **options)
            scores[label] = score_trees(trees, treebank)
        return {**scores, **self.baselines[part]}

    def metric(self, evaluation: dict[str, Any]) -> float:
        """Minus the sentence F1 of `evaluation`."""
        return -evaluation["trees"][self.data.method(self.data.selection_method)[0]]["sentence_f1"]

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Parse the test treebank and score all tree types."""
        treebank = self.treebanks["test"]
        scores = self._score(run.model, "test", self.data.methods)
        self.accelerator.print("test trees:\n" + score_table(scores, treebank))
        test = {
            "trees": score_numbers(scores),
            "num_sentences": len(treebank.words),
            "convention": f"{treebank.convention}; {next(iter(scores.values())).convention}",
        }
        return {**super().final_results(run, step), "test": test}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Write `evaluation.json`."""
        before, best, trees = results["evaluations"][0], kept_evaluation(results), results["test"]["trees"]
        kinds = ("sentence_f1", "corpus_f1")
        flat = {f"{kind} {name}": numbers[kind] for name, numbers in trees.items() for kind in kinds}
        self.save_scores(run, "grammar_induction", flat, results)
        label = self.data.method(self.data.selection_method)[0]
        labels = [self.data.method(name)[0] for name in self.data.methods]
        found = "; ".join(f"{name} {trees[name]['sentence_f1']:.2f}" for name in labels)
        return (
            f"validation sentence F1 ({label}) {before['trees'][label]['sentence_f1']:.2f} -> "
            f"{best['trees'][label]['sentence_f1']:.2f} (best at step {best['step']}); test sentence F1: {found}; "
            f"right branching {trees['right']['sentence_f1']:.2f}"
        )


main = partial(run_recipe, InductionRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
