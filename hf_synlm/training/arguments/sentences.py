# SPDX-License-Identifier: Apache-2.0
"""Arguments about files of sentences, and the tokenizer made from their words."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.arguments import option
from hf_synlm.data.brackets import LABEL_SEPARATORS
from hf_synlm.data.dependencies import DEPENDENCY_OPTIONS, Invalid, Labels, NonProjective, Structure, Tokens
from hf_synlm.data.samples import EMBEDDED, resolve_embedded
from hf_synlm.data.vocabulary import UnknownRule, word_tokenizer

Sentences = Iterable[Sequence[str]]
VOCAB_SIZE = "Largest number of token ids. Special tokens and classes of unknown words count, too."
MIN_FREQUENCY = "Words (or characters) rarer than this are unknown. 'bpe' makes no pieces rarer than this."
UNKNOWN_WORDS = "Tokens for unknown words: one token ('single'), or one for each class of word forms."


def check_files(*paths: str) -> None:
    """Raise ValueError for a file that does not exist."""
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"There is no file {path!r}.")


def resolve_files(arguments: Any, **samples: str) -> None:
    """Let "embedded" in lists of files stand for a sample; raise ValueError for a file that does not exist."""
    for name, sample in samples.items():
        files = [resolve_embedded(file, sample) for file in getattr(arguments, name)]
        setattr(arguments, name, files)
        check_files(*files)


@dataclass(kw_only=True)
class DependencyArguments:
    """How dependencies (CoNLL-U) become trees; bracketed trees have none of these options."""

    tree_structure: Structure | None = option(
        None, "Trees to make of dependencies: 'flat' (default), or binary by 'left-first' or 'right-first'."
    )
    tree_labels: Labels | None = option(
        None, "Label constituents of dependencies by 'upos' (default), by the relation 'deprel', or 'X'."
    )
    tree_tokens: Tokens | None = option(
        None, "'surface' (default) counts a multiword token (German im) as one word, 'syntactic' as several."
    )
    tree_punctuation: Literal["keep", "remove"] | None = option(
        None, "Keep (default) or remove words with UPOS PUNCT in dependencies."
    )
    tree_nonprojective: NonProjective | None = option(
        None, "If arcs of dependencies cross, 'lift' them (default), 'skip' the sentence, or 'refuse' the file."
    )
    tree_invalid: Invalid | None = option(
        None, "If dependencies form no tree (several roots, a cycle), 'refuse' the file (default) or 'skip' them."
    )

    @property
    def dependencies(self) -> dict[str, Any]:
        """The options of `read_dependency_trees` that were given."""
        given = {name: getattr(self, f"tree_{name}") for name in (*DEPENDENCY_OPTIONS, "punctuation")}
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class SentenceFileArguments(DependencyArguments):
    """Files of sentences (if none is named, the embedded treebank), and the tokenizer for their words."""

    train_files: list[str] = option([], "Files to train on. If you name no file, the embedded treebank is used.")
    validation_files: list[str] = option([], "Files for validation.")
    test_files: list[str] = option([], "Files for the evaluation of the final model. You may leave them out.")
    split_leaves: bool = option(
        False, "Read a leaf of several words, (NN New York), as several leaves. Otherwise such a leaf is an error."
    )
    drop_tags: list[str] = option([], "In bracketed trees, leave out words with these tags.")
    drop_labels: list[str] = option([], "Leave out the brackets of these labels, but keep the words inside.")
    label_separators: str | None = option(
        None, f"Characters between a label and its function tags. These tags are removed. Default: {LABEL_SEPARATORS}"
    )
    lemma_separator: str | None = option(None, "Character between word and lemma, if leaves hold both.")
    tokenizer_name: str | None = option(
        None, "Folder or Hub name of a tokenizer. By default, a tokenizer is made from the words."
    )
    tokenizer_vocab_size: int | None = option(None, VOCAB_SIZE)
    tokenizer_min_frequency: int = option(1, MIN_FREQUENCY, minimum=1)
    unknown_words: UnknownRule = option("single", UNKNOWN_WORDS)
    lowercase: bool = option(False, "Lower-case all words.")
    replace_numbers: bool = option(False, "Replace all numbers by one token.")

    # A tokenizer depends on these arguments and on the words.
    tokenizer_options: ClassVar[str] = (
        "tokenizer_type tokenizer_vocab_size tokenizer_min_frequency unknown_words lowercase replace_numbers "
        "split_leaves"
    )

    def __post_init__(self):
        """Check the values, and name the files of the embedded treebank."""
        if not self.files:
            self.train_files, self.validation_files, self.test_files = [EMBEDDED], [EMBEDDED], [EMBEDDED]
        resolve_files(self, train_files="trees.train.txt", validation_files="trees.valid.txt")
        resolve_files(self, test_files="trees.test.txt")
        if not self.train_files:
            raise ValueError("--train-files are not set, but other files are. Pass --train-files, or no files.")
        if not self.validation_files:
            raise ValueError("--validation-files are not set. Pass other files than --train-files.")

    @property
    def reading(self) -> dict[str, Any]:
        """The options of `read_treebank` that were given."""
        names = ("split_leaves", "drop_tags", "drop_labels", "label_separators", "lemma_separator", "dependencies")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value not in (None, False, [], {})}

    @property
    def files(self) -> list[str]:
        """Files for training, validation and test."""
        return [path for files in self.splits for path in files]

    @property
    def splits(self) -> list[list[str]]:
        """Files for training, for validation and, if there are some, for the test."""
        return [files for files in (self.train_files, self.validation_files, self.test_files) if files]

    def describe_splits(self, splits: Any, describe: Callable[[Any], str]) -> str:
        """A line per split: its files and, by `describe`, its size."""
        lines = []
        for split in ("train", "validation", "test"):
            names, data = self.names(split), getattr(splits, split)
            lines.append(f"{split} data: none" if data is None else f"{split} data ({names}): {describe(data)}")
        return "\n".join(lines)

    def names(self, split: str = "train") -> str:
        """Names of the files of a `split`."""
        return ", ".join(Path(path).name for path in getattr(self, f"{split}_files"))

    def describe(self, kind: str = "trees") -> str:
        """Sentences for the model card: the files, and how their words become tokens."""
        rules = ["lower case"] * self.lowercase + ["numbers as one token"] * self.replace_numbers
        if self.tokenizer_min_frequency > 1:
            rules.append(f"unknown if they occur less than {self.tokenizer_min_frequency} times")
        words = f"Words: {', '.join(rules) or 'as they are'}."
        if self.tokenizer_name:
            words = f"Tokenizer: {self.tokenizer_name}."
        return f"The {kind} of {self.names()}. {words}"

    def make_tokenizer(self, sentences: Sentences, end_token: bool) -> PreTrainedTokenizerBase:
        """Make a tokenizer of words from `sentences`, with an end token or without."""
        return word_tokenizer(
            sentences,
            unknown=self.unknown_words,
            min_count=self.tokenizer_min_frequency,
            vocab_size=self.tokenizer_vocab_size,
            lowercase=self.lowercase,
            replace_numbers=self.replace_numbers,
            end_token=end_token,
        )


@dataclass
class BatchedFileArguments(SentenceFileArguments):
    """Files of sentences from which batches are drawn."""

    batch_group_size: int = option(4096, "Number of sentences of similar length to draw batches from.", minimum=1)
