"""What is measured on a recurrent language model, on its way and at its end: arguments, held-out text and trees."""

from dataclasses import dataclass, field

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.streams import TokenStream
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.parsing import CONVENTIONS, keep_by_tag
from hf_synlm.evaluation.treebank_parsing import PUNCTUATION, Treebank, make_treebank
from hf_synlm.training.stream_batches import StreamDataArguments, check_files, read_trees
from hf_synlm.training.stream_evaluation import TextEvaluator, TreeScorer


@dataclass
class ParsingArguments:
    """Which trees are compared with the induced ones, and how."""

    parsing_files: list[str] = field(
        default_factory=list,
        metadata={"help": "Treebanks parsed after every epoch; default: the validation files, if they hold trees."},
    )
    final_parsing_files: list[str] = field(
        default_factory=list,
        metadata={"help": "Treebanks that the final model parses; default: the test files, if they hold trees."},
    )
    parsing_preprocessing: str | None = field(
        default=None, metadata={"help": "Preprocessing of these trees; default: that of the training text."}
    )
    parsing_max_words: int | None = field(
        default=None,
        metadata={
            "help": "Leave out sentences with more words, counted after preprocessing and, unless punctuation is kept, "
            "without it; default: max_sentence_words."
        },
    )
    punctuation: str = field(
        default="remove",
        metadata={"help": "'remove' it before parsing, 'ignore' it in the score only, or 'keep' it as words."},
    )
    parsing_convention: str = field(
        default="on-lstm", metadata={"help": f"How spans are counted: {', '.join(CONVENTIONS)}."}
    )
    parse_options: str | None = field(
        default=None,
        metadata={"help": "Options of the model's parse, such as decoder=biased or layer=1: as config_overrides."},
    )
    parse_sentences: int | None = field(
        default=None, metadata={"help": "Sentences parsed after every epoch, spread evenly; default: all; 0: none."}
    )
    parse_batch_size: int = field(default=32, metadata={"help": "Sentences per process that are parsed together."})
    final_report: bool = field(
        default=False,
        metadata={
            "help": "At the end, load the saved model in a process without hf_synlm; parse some of the final sentences "
            "and generate one there."
        },
    )

    def __post_init__(self):
        """Check the values."""
        if self.punctuation not in PUNCTUATION:
            raise ValueError(f"punctuation is {self.punctuation!r}. Choose among {', '.join(PUNCTUATION)}.")
        if self.parsing_convention not in CONVENTIONS:
            raise ValueError(
                f"parsing_convention is {self.parsing_convention!r}. Choose among {', '.join(CONVENTIONS)}."
            )
        for name in ("parse_batch_size", "parsing_max_words"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 and is {value}.")
        if self.parse_sentences is not None and self.parse_sentences < 0:
            raise ValueError(f"parse_sentences must not be negative and is {self.parse_sentences}.")
        check_files(*self.parsing_files, *self.final_parsing_files)

    def complete(self, data: StreamDataArguments, architecture: str) -> None:
        """Take over from the data what is not given; refuse what an architecture without trees cannot do."""
        for name in ("parsing_files", "final_parsing_files", "parse_options", "final_report"):
            if architecture == "awd_lstm" and getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but AWD-LSTM has no trees. Leave it out.")
        if data.file_format == "treebank":
            self.parsing_files = self.parsing_files or data.validation_files
            self.final_parsing_files = self.final_parsing_files or data.test_files
        if self.parsing_preprocessing is None:
            self.parsing_preprocessing = data.preprocessing
        if self.parsing_max_words is None:
            self.parsing_max_words = data.max_sentence_words
        if self.final_report and not self.final_parsing_files:
            raise ValueError("final_report needs trees to parse. Set final_parsing_files.")

    def treebank(self, paths: list[str], split_leaves: bool, max_sentences: int | None = None) -> Treebank:
        """Gold trees of files."""
        trees = read_trees(paths, self.parsing_preprocessing, split_leaves)
        return make_treebank(filter(self._is_short, trees), self.punctuation, max_sentences)

    def _is_short(self, sentence: TreebankSentence) -> bool:
        count = len(sentence.words) if self.punctuation == "keep" else sum(keep_by_tag(sentence.tags))
        return self.parsing_max_words is None or count <= self.parsing_max_words


@dataclass
class Measures:
    """What is measured after every epoch, and at the end; `test` and `final_trees` may be missing."""

    validation: TextEvaluator
    test: TextEvaluator | None
    final_trees: TreeScorer | None


def has_trees(config: PreTrainedConfig) -> bool:
    """Whether a model induces trees: all but AWD-LSTM do."""
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
    """Everything that will be measured, tried on one sentence of every treebank.

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
        ValueError: for text, trees or options of `parse` that training would end with in vain.
    """

    def scorer(paths: list[str], limit: int | None) -> TreeScorer | None:
        if not has_trees(model.config) or not paths or limit == 0:
            return None
        bank = parsing.treebank(paths, data.split_leaves)
        options = (parsing.parsing_convention, parsing.parse_options, parsing.parse_batch_size)
        found = TreeScorer(bank, tokenizer, *options, limit)
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
