"""Arguments about files of sentences, and the tokenizer made from their words: for RNNG and the recurrent models."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_synlm.data.samples import sample_path
from hf_synlm.data.vocabulary import UnknownRule, word_tokenizer
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.training.run import save_tokenizer_once, words_fingerprint

Sentences = Iterable[Sequence[str]]
VOCAB_SIZE = {"help": "Largest number of token ids, special tokens and classes of unknown words included."}
MIN_FREQUENCY = {"help": "Rarer words (or characters) are unknown; 'bpe' makes no rarer pieces."}
UNKNOWN_WORDS = {"help": "Tokens of unknown words: a 'single' one, or classes by form."}


def check_files(*paths: str) -> None:
    """Raise ValueError for a file that does not exist."""
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"There is no file {path!r}.")


def check_minimum(arguments: Any, minimum: int, names: str) -> None:
    """Check numbers that the user gives.

    Args:
        arguments: a dataclass.
        minimum: 0 or 1.
        names: of its fields, separated by spaces; a value of `None` is not checked.

    Raises:
        ValueError: a number is too small.
    """
    limit = "must not be negative" if minimum == 0 else f"must be at least {minimum}"
    for name in names.split():
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} {limit} and is {value}.")


@dataclass
class SentenceFileArguments:
    """Files of sentences, and the tokenizer for their words; the default is the embedded treebank."""

    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Files to train on; default: the embedded treebank."}
    )
    validation_files: list[str] = field(default_factory=list, metadata={"help": "Files for validation."})
    test_files: list[str] = field(
        default_factory=list, metadata={"help": "Files for the evaluation of the final model; optional."}
    )
    split_leaves: bool = field(
        default=False,
        metadata={"help": "Read a leaf of several words, (NN New York), as several leaves; otherwise it is an error."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a tokenizer; default: one is made from the words."}
    )
    tokenizer_vocab_size: int | None = field(default=None, metadata=VOCAB_SIZE)
    tokenizer_min_frequency: int = field(default=1, metadata=MIN_FREQUENCY)
    unknown_words: UnknownRule = field(default="single", metadata=UNKNOWN_WORDS)
    lowercase: bool = field(default=False, metadata={"help": "Lower-case all words."})
    replace_numbers: bool = field(default=False, metadata={"help": "Replace all numbers by one token."})
    batch_group_size: int = field(
        default=4096, metadata={"help": "Sentences of similar length from which the batches are drawn."}
    )

    # A tokenizer depends on these arguments and on the words.
    tokenizer_options: ClassVar[str] = (
        "tokenizer_type tokenizer_vocab_size tokenizer_min_frequency unknown_words lowercase replace_numbers "
        "split_leaves"
    )

    def __post_init__(self):
        """Check the values, and name the files of the embedded treebank."""
        check_minimum(self, 1, "tokenizer_min_frequency batch_group_size")
        if not self.train_files:
            self.train_files = [str(sample_path("trees.train.txt"))]
            self.validation_files = self.validation_files or [str(sample_path("trees.valid.txt"))]
            self.test_files = self.test_files or [str(sample_path("trees.test.txt"))]
        if not self.validation_files:
            raise ValueError("validation_files are not set. Pass files that are not trained on.")
        check_files(*self.files)

    @property
    def files(self) -> list[str]:
        """Files for training, validation and test."""
        return [*self.train_files, *self.validation_files, *self.test_files]

    @property
    def train_names(self) -> str:
        """Names of the training files, for the model card."""
        return ", ".join(Path(path).name for path in self.train_files)

    def word_tokenizer(self, sentences: Sentences, end_token: bool = False) -> PreTrainedTokenizerBase:
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


def load_or_make_tokenizer(
    accelerator: Accelerator,
    data: SentenceFileArguments,
    name: str | None,
    output_dir: Path,
    read_words: Callable[[], Sentences],
    make: Callable[[Sentences], PreTrainedTokenizerBase],
    *special_tokens: str,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer, or make one and keep it in `output_dir/tokenizer`, where a resumed run finds it.

    Args:
        accelerator: the main process makes it, the others load.
        data: arguments.
        name: folder or Hub name, or `None` to make one.
        output_dir: of the run.
        read_words: reads the words of the training sentences.
        make: makes a tokenizer from them.
        *special_tokens: that the model needs, such as "pad_token".

    Returns:
        A fast tokenizer.

    Raises:
        ValueError: it lacks a special token, or the one in `output_dir` was made from something else.
    """
    folder = output_dir / "tokenizer" if name is None else Path(name)
    if name is None:
        made_from = {option: getattr(data, option) for option in data.tokenizer_options.split()}
        made_from["training_words"] = words_fingerprint(read_words())
        save_tokenizer_once(accelerator, folder, lambda: make(read_words()), made_from)
    source = name or str(folder)
    check_tokenizer_source(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    for kind in special_tokens:
        if getattr(tokenizer, kind) is None:
            raise ValueError(f"The tokenizer {source!r} has no {kind}. Set it and save the tokenizer.")
    return tokenizer
