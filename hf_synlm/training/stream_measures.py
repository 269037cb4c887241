"""What is measured on a recurrent language model during training and at the end: arguments, held-out text and trees."""

from dataclasses import dataclass
from typing import Any, Literal

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_synlm.data.streams import TokenStream
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.parsing import CONVENTIONS, keep_words
from hf_synlm.evaluation.treebank_parsing import Treebank, make_treebank
from hf_synlm.training.arguments import check_choice, check_minimum
from hf_synlm.training.sentence_files import check_files
from hf_synlm.training.stream_batches import Preprocessing, StreamDataArguments, read_trees
from hf_synlm.training.stream_evaluation import TextEvaluator, TreeScorer


@dataclass
class ParsingArguments:
    """Which trees are compared with the induced ones, and how."""

    parsing_files: list[str] = HfArg(
        default_factory=list,
        help="Treebanks parsed after every epoch; default: the validation files, if they are treebanks.",
    )
    final_parsing_files: list[str] = HfArg(
        default_factory=list,
        help="Treebanks that the final model parses; default: the test files, if they are treebanks.",
    )
    parsing_preprocessing: Preprocessing | None = HfArg(
        default=None, help="Preprocessing of these trees; default: that of the training text."
    )
    parsing_max_words: int | None = HfArg(
        default=None,
        help="Leave out sentences with more words, counted after preprocessing and, unless punctuation is kept, "
        "without it; default: max_sentence_words.",
    )
    punctuation: Literal["remove", "ignore", "keep"] = HfArg(
        default="remove", help="'remove' it before parsing, 'ignore' it in the score only, or 'keep' it as words."
    )
    parsing_convention: str = HfArg(default="on-lstm", help=f"How spans are counted: {', '.join(CONVENTIONS)}.")
    parse_options: str | None = HfArg(
        default=None, help="Options of `parse`, such as decoder=biased,layer=1; written like --config_overrides."
    )
    parse_sentences: int | None = HfArg(
        default=None, help="Sentences parsed after every epoch, spread evenly; default: all; 0: none."
    )
    parse_batch_size: int = HfArg(default=32, help="Sentences per process that are parsed together.")
    final_report: bool = HfArg(
        default=False,
        help="At the end, load the saved model in a process without hf_synlm; parse some of the final sentences "
        "and generate one there.",
    )

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "parse_batch_size parsing_max_words")
        check_minimum(self, 0, "parse_sentences")
        check_choice("parsing_convention", self.parsing_convention, CONVENTIONS)
        check_files(*self.parsing_files, *self.final_parsing_files)

    def complete(self, data: StreamDataArguments, architecture: str) -> None:
        """Complete the arguments.

        Args:
            data: gives the values that are missing here.
            architecture: of the model.

        Raises:
            ValueError: trees are asked of a model that has none.
        """
        for name in ("parsing_files", "final_parsing_files", "parse_options", "final_report"):
            if architecture == "awd_lstm" and getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but AWD-LSTM has no trees. Leave it out.")
        if data.file_format == "treebank":
            self.parsing_files = self.parsing_files or data.validation_files
            self.final_parsing_files = self.final_parsing_files or data.test_files
        self.parsing_preprocessing = self.parsing_preprocessing or data.preprocessing
        self.parsing_max_words = self.parsing_max_words or data.max_sentence_words
        if self.final_report and not self.final_parsing_files:
            raise ValueError("final_report needs trees to parse. Set final_parsing_files.")

    def treebank(self, paths: list[str], split_leaves: bool, max_sentences: int | None = None) -> Treebank:
        """Read gold trees.

        Args:
            paths: the files.
            split_leaves: see `StreamDataArguments`.
            max_sentences: read only this many.

        Returns:
            The trees.
        """
        trees = read_trees(paths, self.parsing_preprocessing or "none", split_leaves)
        return make_treebank(filter(self._is_short, trees), self.punctuation, max_sentences)

    def _is_short(self, sentence: TreebankSentence) -> bool:
        is_word = keep_words(sentence.words, sentence.tags, "tag")
        count = len(is_word) if self.punctuation == "keep" else sum(is_word)
        return self.parsing_max_words is None or count <= self.parsing_max_words


@dataclass
class Measures:
    """Evaluators after every epoch and at the end; `test` and `final_trees` may be missing."""

    validation: TextEvaluator
    test: TextEvaluator | None
    final_trees: TreeScorer | None


def has_trees(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` induces trees: all but AWD-LSTM do."""
    return getattr(config, "span_attention", True)


def make_measures(
    accelerator: Accelerator,
    validation: TokenStream,
    test: TokenStream | None,
    data: StreamDataArguments,
    parsing: ParsingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
) -> Measures:
    """Make the evaluators, and try them on one sentence of every treebank.

    Args:
        accelerator: of the run.
        validation: text.
        test: text; may be missing.
        data: arguments.
        parsing: arguments.
        model: before it is trained.
        tokenizer: of the model.
        size: of evaluation batches.

    Returns:
        The measures.

    Raises:
        ValueError: for text, trees or options of `parse` that would fail after training.
    """

    def scorer(paths: list[str], limit: int | None) -> TreeScorer | None:
        if not has_trees(model.config) or not paths or limit == 0:
            return None
        bank = parsing.treebank(paths, data.split_leaves)
        options: Any = parsing.parse_options  # a mapping, once the command line is parsed
        found = TreeScorer(bank, tokenizer, parsing.parsing_convention, options, parsing.parse_batch_size, limit)
        found.rehearse(model)
        return found

    def evaluator(name: str, stream: TokenStream, size: int, trees: TreeScorer | None) -> TextEvaluator:
        of_characters = data.tokenizer_type == "characters"
        return TextEvaluator(accelerator, name, stream, data, tokenizer.pad_token_id, size, trees, of_characters)

    trees = scorer(parsing.parsing_files, parsing.parse_sentences)
    return Measures(
        validation=evaluator("validation", validation, size, trees),
        test=None if test is None else evaluator("test", test, data.test_batch_size or size, None),
        final_trees=scorer(parsing.final_parsing_files, None),
    )
