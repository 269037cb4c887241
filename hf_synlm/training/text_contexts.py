"""Arguments of a run about its text, and the contexts that the run trains on.

Text is prepared once, as `hf_synlm.data.prepare` describes; contexts are read from the prepared shards.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers.hf_argparser import HfArg

from hf_synlm.data.contexts import ContextDataset
from hf_synlm.data.prepare import CorpusArguments, PreparedText, is_prepared, prepare
from hf_synlm.data.shards import PreparedCorpus


@dataclass
class DataArguments(CorpusArguments):
    """Where text comes from and how it becomes contexts."""

    prepared: str | None = HfArg(
        default=None,
        help="Folder of prepared text. Missing parts are prepared; without the name of a text, the folder must "
        "be complete. Default: the folder 'text' in output_dir.",
    )
    verify_prepared: bool = HfArg(
        default=False, help="Check the checksums of the prepared text, not only its file sizes."
    )
    max_sentence_tokens: int | None = HfArg(default=None, help="Leave longer sentences out.")
    keep_words_together: bool = HfArg(
        default=False, help="Forbid constituents that split words in training. The authors allow them."
    )
    context_length: int = HfArg(default=1024, help="Largest number of tokens of a context.")

    def __post_init__(self):
        """Check the values."""
        if self.prepared is not None and not self.names_text and not is_prepared(self.prepared):
            raise ValueError(
                f"{self.prepared} is not a complete folder of prepared text, and no text is named. Correct "
                "--prepared, or name the text to prepare there (--train_files, --dataset_name). For the embedded "
                f"corpus: python -m hf_synlm.data.prepare --output_dir {self.prepared}"
            )
        super().__post_init__()
        if self.context_length < 1:
            raise ValueError(f"context_length must be at least 1 and is {self.context_length}.")

    @property
    def location(self) -> str | None:
        """The folder of prepared text, if it is named."""
        return self.prepared


def load_text(data: DataArguments, output_dir: Path, tokenizer_name: str | None) -> PreparedText:
    """Prepare the text of a run, or open it. Every process calls; one of them prepares.

    Args:
        data: arguments.
        output_dir: of the run.
        tokenizer_name: folder or Hub name if the arguments name no tokenizer; `None`: train one.

    Returns:
        The tokenizer, training and validation text.

    Raises:
        ValueError: see `prepare`.
    """
    data.tokenizer_name = data.tokenizer_name or tokenizer_name
    return prepare(data, data.prepared or output_dir / "text", verify=data.verify_prepared)


def load_contexts(data: DataArguments, corpus: PreparedCorpus, end_of_document_id: int | None) -> ContextDataset:
    """Contexts of a prepared corpus.

    Args:
        data: arguments.
        corpus: training or validation text.
        end_of_document_id: id that follows every document as a separate sentence, or `None`.

    Returns:
        The contexts.

    Raises:
        ValueError: no contexts are left.
    """
    return ContextDataset(
        corpus,
        data.context_length,
        max_sentence_tokens=data.max_sentence_tokens,
        end_of_document_id=end_of_document_id,
        with_word_ends=data.keep_words_together,
    )
