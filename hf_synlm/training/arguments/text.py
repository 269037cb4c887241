# SPDX-License-Identifier: Apache-2.0
"""Arguments of the programs that read text, sentence by sentence or as a stream, and trees to compare with."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.arguments import option
from hf_synlm.data.punctuation import check_tags, keep_words
from hf_synlm.data.text import read_lines
from hf_synlm.data.tokenizers import character_tokenizer
from hf_synlm.data.treebank import TreebankSentence, count_tags, parse_treebank, read_treebank, to_ptb_concat
from hf_synlm.evaluation.trees.gold_treebank import Treebank, make_treebank
from hf_synlm.evaluation.trees.parsing import CONVENTIONS
from hf_synlm.training.arguments.base import ModelArguments, TrainingArguments, refuse
from hf_synlm.training.arguments.sentences import BatchedFileArguments, Sentences, check_files

TREE_TEST_LINES = 200  # that are read to tell trees from text


Preprocessing = Literal["none", "ptb-concat", "words-only"]


@dataclass
class TextDataArguments(BatchedFileArguments):
    """Files of text or trees, and how their words become tokens; sentences are read one by one."""

    file_format: Literal["treebank", "text"] = option(
        "treebank", "'treebank' has bracketed trees. 'text' has one sentence per line, with spaces between words."
    )
    preprocessing: Preprocessing = option(
        "none",
        "Preprocessing of trees. 'ptb-concat' makes the form of Mikolov's corpus, with lower case, numbers as N and "
        "no punctuation. 'words-only' drops leaves whose tag is punctuation, $ or #. 'none' changes nothing.",
    )
    max_sentence_words: int | None = option(
        None, "Longest sentence in words, after preprocessing. Longer sentences are left out.", minimum=1
    )
    tokenizer_type: Literal["words", "characters"] = option("words", "Tokenizer to make.")
    max_batch_tokens: int = option(5000, "Largest number of tokens in a micro batch, with padding.", minimum=1)
    test_batch_size: int | None = option(
        None,
        "Rows or sentences in the evaluation of the test files. By default, --per-device-eval-batch-size counts. In "
        "a stream of one row, every token is predicted from all tokens before it.",
        minimum=1,
    )

    tokenizer_options = f"{BatchedFileArguments.tokenizer_options} file_format preprocessing max_sentence_words"
    batching = "sentences"
    bptt = 0
    tree_supervision = False
    binarized_spans = False
    min_sentence_words = 0

    def __post_init__(self):
        """Check the values."""
        if self.tokenizer_type == "characters":
            names = "lowercase replace_numbers tokenizer_vocab_size unknown_words"
            refuse(self, names, "which belongs to words, not to characters")
        if self.file_format == "text":
            refuse(self, "preprocessing", "which needs trees")
            if not self.train_files:
                raise ValueError("--train-files are not set. Pass files of text, one sentence per line.")
        super().__post_init__()
        if self.file_format == "text":
            check_text(*self.files)

    def make_tokenizer(self, sentences: Sentences, end_token: bool) -> PreTrainedTokenizerBase:
        """Make a tokenizer from sentences: of words, or of characters, always with an end token."""
        if self.tokenizer_type == "characters":
            return character_tokenizer(map(" ".join, sentences), min_count=self.tokenizer_min_frequency)
        return super().make_tokenizer(sentences, end_token)

    def describe(self, kind: str = "trees") -> str:
        """Sentences for the model card."""
        prepared = "" if self.preprocessing == "none" else f" Preprocessing: {self.preprocessing}."
        return super().describe(kind if self.tree_supervision else "text") + prepared


@dataclass
class StreamDataArguments(TextDataArguments):
    """Files of text or trees, how they become tokens, and how the tokens are read."""

    batching: Literal["stream", "sentences"] = option(
        "stream",
        "'stream' reads running text and keeps the state between segments. 'sentences' reads each sentence alone.",
    )
    bptt: int = option(70, "Usual length of a segment in tokens.", minimum=1)
    variable_bptt: bool = option(
        True, "Vary the length of training segments around --bptt or half of it, and scale the learning rate."
    )
    tree_supervision: bool = option(False, "Also learn distances (ON-LSTM, PRPN) or spans (PaLM) of gold trees.")
    binarized_spans: bool = option(False, "For PaLM: spans that right binarization adds are gold, too.")

    def __post_init__(self):
        """Check the values."""
        if self.file_format == "text":
            refuse(self, "tree_supervision", "which needs trees")
        super().__post_init__()


def check_text(*paths: str) -> None:
    """Raise ValueError for a file that begins with a tree: its brackets and labels would be learned as words."""
    for path in paths:
        if any(line.count("\t") == 9 for line in islice(read_lines(path), TREE_TEST_LINES)):
            raise ValueError(f"{path!r} is a treebank in CoNLL-U. Use --file-format treebank, or pass a file of words.")
        trees = parse_treebank(islice(read_lines(path), TREE_TEST_LINES), split_leaves=True)
        try:
            tree = next(trees, None)
        except ValueError:
            continue  # not a tree
        # A bare leaf such as (laughter continues) may be text.
        if tree is not None and any(label != "ROOT" for label, _, _ in tree.labeled_spans):
            raise ValueError(f"{path!r} begins with a tree. Use --file-format treebank, or pass a file of words.")


def read_trees(
    paths: Sequence[str], preprocessing: Preprocessing = "none", reading: dict[str, Any] | None = None
) -> Iterator[TreebankSentence]:
    """Read treebank files and preprocess their sentences; those without words are left out."""
    reading = reading or {}
    if preprocessing == "words-only":
        _check_tags(tuple(paths), json.dumps(reading))
    for path in paths:
        for sentence in read_treebank(path, **reading):
            if preprocessing == "words-only":
                prepared = sentence.select_words(keep_words(sentence.words, sentence.tags, "tag"))
            else:
                prepared = to_ptb_concat(sentence) if preprocessing == "ptb-concat" else sentence
            if prepared is not None and prepared.words:
                yield prepared


@cache
def _check_tags(paths: tuple[str, ...], reading: str) -> None:
    """Raise ValueError where tags do not tell words; files that are read again were checked."""
    remedy = f"leave out the preprocessing 'words-only' of {', '.join(paths)}"
    check_tags(count_tags(paths, **json.loads(reading)), remedy)


@dataclass
class ParsingArguments:
    """Which trees are compared with the induced ones, and how."""

    parsing_files: list[str] = option(
        [], "Treebanks to parse after every epoch. By default, the validation files are parsed if they are treebanks."
    )
    final_parsing_files: list[str] = option(
        [], "Treebanks that the final model parses. By default, the test files are parsed if they are treebanks."
    )
    parsing_preprocessing: Preprocessing | None = option(
        None, "Preprocessing of the trees to parse. By default, --preprocessing counts."
    )
    parsing_max_words: int | None = option(
        None,
        "Leave out sentences with more words than this. Words are counted after preprocessing, and punctuation "
        "counts only if it is kept. Default: --max-sentence-words.",
        minimum=1,
    )
    punctuation: Literal["remove", "ignore", "keep"] = option(
        "remove", "'remove' punctuation before parsing, 'ignore' it in the score only, or 'keep' it as words."
    )
    parsing_convention: str = option("on-lstm", "How spans are counted.", choices=list(CONVENTIONS))
    parse_options: str | None = option(
        None, "Options of `parse`, such as decoder=biased,layer=1. They are written like --config-overrides."
    )
    parse_sentences: int | None = option(
        None, "Number of sentences to parse after every epoch, spread evenly (default: all, 0: none).", minimum=0
    )
    final_report: bool = option(
        False,
        "At the end, check that the saved model works the same without hf_synlm. Also parse some of the final "
        "sentences, and generate one.",
    )

    def __post_init__(self):
        """Check the values."""
        check_files(*self.parsing_files, *self.final_parsing_files)

    def complete(self, data: TextDataArguments) -> None:
        """Complete the arguments from those of the data."""
        if data.file_format == "treebank":
            self.parsing_files = self.parsing_files or data.validation_files
            self.final_parsing_files = self.final_parsing_files or data.test_files
        self.parsing_preprocessing = self.parsing_preprocessing or data.preprocessing
        self.parsing_max_words = self.parsing_max_words or data.max_sentence_words
        if self.final_report and not self.report_files:
            raise ValueError(
                "--final-report needs trees to parse. Set --final-parsing-files, or pass --final-report false."
            )

    @property
    def report_files(self) -> list[str]:
        """Trees that the final report parses: those of the test, or else of the evaluations."""
        return self.final_parsing_files or self.parsing_files

    def treebank(self, paths: list[str], reading: dict[str, Any], max_sentences: int | None = None) -> Treebank:
        """Read gold trees."""
        trees = read_trees(paths, self.parsing_preprocessing or "none", reading)
        return make_treebank(filter(self._is_short, trees), self.punctuation, max_sentences)

    def _is_short(self, sentence: TreebankSentence) -> bool:
        is_word = keep_words(sentence.words, sentence.tags, "tag")
        count = len(is_word) if self.punctuation == "keep" else sum(is_word)
        return self.parsing_max_words is None or count <= self.parsing_max_words


@dataclass
class ScheduleArguments:
    """Which optimizers train the epochs, with which rates."""

    schedule: Literal["sgd-asgd", "adam-asgd", "adam-plateau"] = option(
        "sgd-asgd",
        "'sgd-asgd' uses SGD, then averaged SGD once the validation loss stops falling (AWD-LSTM, ON-LSTM). "
        "'adam-asgd' uses Adam for --averaging-epoch epochs, then averaged SGD from the best weights (PaLM). "
        "'adam-plateau' uses Adam, and lowers the rate when the validation loss stops falling (PRPN).",
    )
    non_monotone_interval: int = option(
        5,
        "For sgd-asgd. Averaging starts when the validation loss is higher than the lowest loss before the last N "
        "epochs (non-monotone trigger). N is this number.",
        minimum=1,
    )
    averaging_epoch: int = option(40, "Epochs with Adam in adam-asgd.", minimum=1)
    averaging_learning_rate: float | None = option(None, "Learning rate of averaged SGD (default: learning_rate).")
    finetuning_epoch: int = option(
        0, "Begin the averages anew after this epoch, if averaging has begun before. 0 never does.", minimum=0
    )
    plateau_patience: int = option(
        2, "In adam-plateau, lower the rate when more epochs than this pass without a new best loss.", minimum=0
    )
    plateau_factor: float = option(0.5, "Factor that lowers the learning rate in adam-plateau.")

    def __post_init__(self):
        """Check the values."""
        if not 0 < self.plateau_factor < 1:
            raise ValueError(f"--plateau-factor must be between 0 and 1 and is {self.plateau_factor}.")
        if self.averaging_learning_rate is not None and not 0 < self.averaging_learning_rate < math.inf:
            raise ValueError(
                f"--averaging-learning-rate must be positive and finite and is {self.averaging_learning_rate}."
            )
        if self.schedule == "adam-plateau":
            refuse(self, "finetuning_epoch", "which needs averaged weights, not adam-plateau")


@dataclass
class RecurrentTrainingArguments(TrainingArguments):
    """The arguments of all scripts with the defaults of AWD-LSTM; epochs decide about rates and evaluations here."""

    per_device_train_batch_size: int = option(
        8, "Rows of the stream, or largest number of sentences in a batch, per process.", minimum=1
    )
    per_device_eval_batch_size: int = option(
        8,
        "Rows of the stream over all processes, or largest number of sentences in a batch of a process.",
        minimum=1,
    )
    without_layers = "gradient_checkpointing torch_compile"

    learning_rate: float = option(30.0, "Learning rate of the first phase.", minimum=0)
    adam_epsilon: float = option(1e-8, "Adam: epsilon, added to the denominator.")
    weight_decay: float = option(
        1.2e-6, "L2 penalty of all parameters. It is added to the gradients after clipping.", minimum=0
    )
    max_grad_norm: float = option(0.25, "Gradients are clipped to this norm. With 0 they are not clipped.", minimum=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option("constant", "Not used here. See --schedule.")
    warmup_ratio: float = option(0.0, "Not used here. See --schedule.")

    def __post_init__(self):
        """Check the values."""
        super().__post_init__()
        refuse(self, "lr_scheduler_type warmup_ratio num_warmup_steps", "but the rate follows schedule")
        refuse(self, self.without_layers, "but these models have no layers to apply it to")
        refuse(self, "evaluation_steps", "but evaluations follow epochs here")


@dataclass
class RecurrentModelArguments(ModelArguments):
    """A recurrent model; the default presets are those of the words of the Penn Treebank."""

    program = "train_recurrent"

    architecture: str = option(
        "on_lstm", "'on_lstm', 'prpn', 'palm', 'ordered_memory', or 'awd_lstm', the baseline without trees."
    )


@dataclass
class PCFGModelArguments(ModelArguments):
    """The grammar; the preset is 'neural-pcfg', 'compound-pcfg', 'tn-pcfg', 'rank-space-pcfg' or 'simple-pcfg'."""

    program = "train_pcfg"

    architecture: str = option("pcfg", "'pcfg'.")


@dataclass
class PCFGDataArguments(TextDataArguments):
    """Files of text or trees; the words become tokens. Sentences of one word are left out: no grammar has them."""

    max_sentence_words: int | None = option(
        40, "Longest sentence in words, after preprocessing. Longer sentences are left out.", minimum=1
    )
    tokenizer_vocab_size: int | None = option(
        10_000, "Largest number of token ids. Special tokens and classes of unknown words count, too."
    )
    batch_group_size: int = option(64, "Number of sentences of similar length to draw batches from.", minimum=1)

    min_sentence_words = 2


@dataclass
class PCFGParsingArguments(ParsingArguments):
    """Which trees are compared with the grammar's; spans are counted as in the papers of the grammars."""

    parsing_convention: str = option("compound-pcfg", "How spans are counted.", choices=list(CONVENTIONS))


@dataclass
class CurriculumArguments:
    """Short sentences first."""

    curriculum_words: int = option(30, "Longest sentence of the first epoch, in words. 0 sets no limit.", minimum=0)
    curriculum_growth: int = option(1, "Number of words that every epoch adds to --curriculum-words.", minimum=0)

    def __post_init__(self):
        """Check the values."""
        if self.curriculum_words == 1:
            raise ValueError("--curriculum-words is 1, but sentences have two words or more. Use 0 or at least 2.")


@dataclass
class PCFGTrainingArguments(TrainingArguments):
    """The arguments of all programs with the authors' defaults; epochs decide about evaluations here."""

    per_device_train_batch_size: int = option(4, "Sentences per process and micro step.", minimum=1)
    per_device_eval_batch_size: int = option(32, "Sentences per process in evaluation.", minimum=1)
    num_train_epochs: int = option(10, "Passes through the data. With 0, --max-train-steps decides.", minimum=0)
    learning_rate: float = option(1e-3, "Adam: learning rate.", minimum=0)
    adam_beta1: float = option(0.75, "Adam: decay of the first moment.")
    adam_epsilon: float = option(1e-8, "Adam: epsilon, added to the denominator.")
    max_grad_norm: float = option(3.0, "Clip gradients to this norm. 0 turns this off.", minimum=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option(
        "constant", "Learning rate after the warm-up. linear and cosine decay to 0, constant does not decay."
    )
    warmup_ratio: float = option(0.0, "Warm-up as a share of all steps.")
