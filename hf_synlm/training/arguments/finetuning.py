# SPDX-License-Identifier: Apache-2.0
"""Arguments of the programs that begin with a pretrained model."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_synlm.data.arguments import option
from hf_synlm.data.files import find_model, flag_of
from hf_synlm.data.punctuation import is_punctuation
from hf_synlm.data.samples import EMBEDDED, resolve_embedded
from hf_synlm.data.text import read_lines
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.suites.glue import glue_task
from hf_synlm.evaluation.trees.gold_treebank import Treebank, load_treebank
from hf_synlm.evaluation.trees.parsing import resolve_convention
from hf_synlm.hub.checkpoint import check_model_source, check_tokenizer_source
from hf_synlm.training.arguments.base import refuse
from hf_synlm.training.arguments.sentences import check_files, resolve_files


@dataclass
class ModelArguments:
    """The model to fine-tune."""

    model_name_or_path: str = option("", "Folder or Hub name of the pretrained model.")
    tokenizer_name: str | None = option(None, "Tokenizer of the model, if it is in another place.")
    config_overrides: str | None = option(
        None,
        "Fields of the model's configuration to change, such as loss weights, dropout or ablations. Write "
        "key=value,key=value or a JSON object, or a mapping in a config file.",
    )
    parser_learning_rate: float | None = option(
        1e-3, "Peak learning rate of GPST's parser, which gives the merge order."
    )
    ignore_mismatched_sizes: bool = option(False, "Initialize weights whose shapes differ, as in classifiers.")
    trust_remote_code: bool = option(
        False, "Run code of the model's repository. Models of this library do not need this."
    )

    def __post_init__(self):
        """Check that model and tokenizer exist."""
        if not self.model_name_or_path:
            raise ValueError("--model-name-or-path is not set. Fine-tuning begins with a pretrained model.")
        self.model_name_or_path = find_model(self.model_name_or_path)
        check_model_source(self.model_name_or_path)
        check_tokenizer_source(self.tokenizer_name or self.model_name_or_path)


GLUE_DATASET = "nyu-mll/glue"


@dataclass
class TableArguments:
    """Tables of examples: a data set, or files."""

    dataset_name: str | None = option(
        None, "Data set of the Hub, or a folder. If you name neither data set nor files, GLUE tasks read nyu-mll/glue."
    )
    dataset_config_name: str | None = option(
        None, "Configuration of the data set, such as 3.0.0. A task of GLUE needs none."
    )
    train_file: str | None = option(None, "File of examples instead of a data set, in json(l), csv, tsv or parquet.")
    validation_file: str | None = option(None, "Validation file (for MNLI, the matched part).")
    max_train_samples: int | None = option(None, "Number of training rows to use (default: all).", minimum=1)
    max_eval_samples: int | None = option(None, "Number of validation rows to use (default: all).", minimum=1)
    preprocessing_num_workers: int | None = option(None, "Processes that encode text.")


def name_split(name: str | None, config: str | None, split: str) -> str:
    """The split `split` of configuration `config` of the data set `name`, for messages."""
    return " ".join(filter(None, (name, config, split)))


@dataclass
class GlueArguments(TableArguments):
    """The task and its files, with the columns of the task and `label`."""

    task_name: str | None = option(
        None, "Task of GLUE: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte or wnli. Default: the task of your files."
    )
    validation_mismatched_file: str | None = option(None, "For MNLI, the mismatched validation file.")
    text_columns: list[str] = option([], "One or two columns of text. Default: columns with usual names.")
    max_length: int = option(
        128,
        "Longest input in tokens, at most the positions of the model. In a pair of texts, the longer text is cut.",
        minimum=4,
    )
    max_train_tokens: int | None = option(
        None,
        "Leave out longer training examples. (The authors use 100 tokens for QQP, and 150 for MNLI and QNLI.)",
        minimum=1,
    )
    objective_weight: float | None = option(
        None, "Weight of the language-model loss of GPST, RNNG or Tree LM (default: the model's)."
    )

    def __post_init__(self):
        """Check the values."""
        if self.task_name is not None:
            self.task_name = glue_task(self.task_name).name
        if self.dataset_name is not None and self.train_file is not None:
            raise ValueError("--dataset-name and --train-file are both given. Choose one source of examples.")
        if (self.train_file is None) != (self.validation_file is None):
            raise ValueError("--train-file and --validation-file belong together. Pass both or none.")
        if self.task_name is None and self.train_file is None and self.dataset_name is None:
            raise ValueError("No training data are given. Pass --task-name, --train-file or --dataset-name.")
        if self.task_name != "mnli":
            refuse(self, "validation_mismatched_file", "which belongs to --task-name mnli")
        if self.task_name == "mnli" and self.train_file is not None and self.validation_mismatched_file is None:
            raise ValueError("MNLI has two validation files. Pass --validation-mismatched-file, too.")
        if self.text_columns and (self.task_name is not None or len(self.text_columns) > 2):
            raise ValueError("--text-columns takes one or two columns. Leave this option out with --task-name.")

    def describe(self) -> str:
        """One sentence for the model card."""
        source = Path(self.train_file).name if self.train_file else self.dataset_name or GLUE_DATASET
        return f"{source}{'' if self.task_name is None else f', task {self.task_name}'}."


# Columns of the published data sets, tried in this order where none are named.
TEXT_COLUMNS = ("document", "article", "text")


SUMMARY_COLUMNS = ("summary", "highlights")


@dataclass
class SummaryArguments(TableArguments):
    """Documents and summaries, and how they become contexts."""

    test_file: str | None = option(None, "File to summarize with the final model (default: the validation file).")
    text_column: str | None = option(
        None, f"Column of the documents. By default, the column has one of these names: {', '.join(TEXT_COLUMNS)}."
    )
    summary_column: str | None = option(
        None,
        "Column of the summaries (a text, or a list of references). By default, the column has one of these names: "
        f"{', '.join(SUMMARY_COLUMNS)}.",
    )
    max_source_length: int = option(900, "Documents are cut to this many tokens.", minimum=1)
    max_target_length: int = option(100, "Summaries are cut to this many tokens in training.", minimum=1)
    prompt: str = option("Summary:", "Text between document and summary.")
    end_token: bool = option(True, "End summaries with the end token. Then generation stops at this token.")
    summary_loss_only: bool = option(
        False,
        "Leave document and prompt out of the token loss. (The authors train on all tokens. GPST's other losses "
        "read all tokens, too.)",
    )
    language: str = option("en", "Language of the sentence splitting (ISO 639).")
    max_predict_samples: int | None = option(None, "Number of test rows to use (default: all).", minimum=1)

    def __post_init__(self):
        """Check the values."""
        if self.train_file is None and self.dataset_name is None:
            raise ValueError("Training data are missing. Pass --dataset-name, or --train-file and --validation-file.")
        if self.train_file is not None and self.validation_file is None:
            raise ValueError("--train-file needs a --validation-file to choose the best model.")
        if self.train_file is not None:
            self.dataset_name = self.dataset_config_name = None
        if not self.prompt.strip():
            raise ValueError("prompt is empty, but the model needs a mark where the summary begins. Give a prompt.")

    def file(self, part: str) -> str | None:
        """File of `train`, `validation` or `test`; `None`: the split of the data set."""
        if part == "test" and self.test_file is None and self.dataset_name is None:
            return self.validation_file
        return {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}[part]

    def source(self, part: str) -> str:
        """File, or data set, configuration and split of `part`."""
        return self.file(part) or name_split(self.dataset_name, self.dataset_config_name, part)

    def describe(self) -> str:
        """One sentence for the model card."""
        return f"{self.dataset_name or Path(str(self.train_file)).name}, documents with summaries."


@dataclass
class DecodingArguments:
    """How summaries are generated, and when."""

    generation_options: str | None = option(
        None,
        "Options of `generate`, written like --config-overrides. The default is that of the paper, "
        "do_sample=true,top_k=2. For GPST it is do_sample=true,num_beams=2,top_k=0 (word-synchronous search draws "
        "one of two hypotheses at every word). The paper's baseline 'w/o sync' has num_beams=2,synchronous=false.",
    )
    max_new_tokens: int | None = option(None, "Longest summary in tokens (default: max_target_length).", minimum=1)
    num_validation_summaries: int = option(
        0,
        "Summaries to generate in each evaluation. Their best ROUGE selects the model. With 0, the lowest loss "
        "selects it.",
        minimum=0,
    )
    use_stemmer: bool = option(False, "ROUGE on stemmed words. The authors do not stem.")

    def options(self, config: Any) -> dict[str, Any]:
        """Options of `generate`: those given, or the paper's for the model of `config`."""
        if self.generation_options:
            return dict(self.generation_options)  # type: ignore[arg-type]  # a mapping, once the command line is parsed
        if config.model_type == "gpst":
            return {"do_sample": True, "num_beams": 2, "top_k": 0}
        return {"do_sample": True, "top_k": 2}


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
        [], "Treebank files whose words are training text, or 'embedded' (also if you name no file)."
    )
    train_files: list[str] = option([], "Text files with one sentence per line. White space separates words.")
    validation_trees: str = option("", "Treebank file that chooses the best model, or 'embedded'.")
    test_trees: str = option("", "Treebank file of the final scores, or 'embedded'.")
    punctuation: Literal["remove", "ignore", "keep"] = option(
        "remove", "Remove punctuation before training and parsing (paper), ignore it in the score only, or keep it."
    )
    lowercase: bool = option(True, "Lower-case all words, as in the paper.")
    max_sentence_tokens: int | None = option(None, "Leave longer training sentences out.", minimum=1)
    max_tree_sentences: int | None = option(None, "Read only this many trees of a treebank.", minimum=1)
    max_tree_words: int | None = option(None, "Score only sentences of at most this many words (WSJ10: 10).", minimum=1)
    methods: list[str] = option(list(METHODS), "Tree types to score at the end.", choices=list(METHODS))
    selection_method: str = option(
        "inside", "Tree type scored during training. Its sentence F1 chooses the best model.", choices=list(METHODS)
    )
    search_num_beams: int = option(20, "Beam of left-to-right parsing.", minimum=1)

    def __post_init__(self):
        """Resolve the names of the embedded treebanks and check the values."""
        if not any((self.train_trees, self.train_files, self.validation_trees, self.test_trees)):
            self.train_trees, self.validation_trees, self.test_trees = [EMBEDDED], EMBEDDED, EMBEDDED
        if not self.train_trees and not self.train_files:
            raise ValueError("No training sentences are named. Pass --train-trees or --train-files.")
        for name in ("validation_trees", "test_trees"):
            if not getattr(self, name):
                raise ValueError(f"{flag_of(name)} is not set. Pass a treebank file with it, or 'embedded'.")
        resolve_files(self, train_trees="trees.train.txt")
        self.validation_trees = resolve_embedded(self.validation_trees, "trees.valid.txt")
        self.test_trees = resolve_embedded(self.test_trees, "trees.test.txt")
        check_files(*self.train_files, self.validation_trees, self.test_trees)

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
