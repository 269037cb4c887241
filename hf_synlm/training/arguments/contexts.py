# SPDX-License-Identifier: Apache-2.0
"""Arguments of the programs that read prepared text: GPST and n-grams."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from hf_synlm.data.arguments import option
from hf_synlm.data.files import CONFIG_FILE, read_json
from hf_synlm.data.samples import EMBEDDED, resolve_embedded
from hf_synlm.evaluation.trees.gold_treebank import PUNCTUATION
from hf_synlm.training.architectures import ARCHITECTURES, Architecture
from hf_synlm.training.arguments.base import ModelArguments
from hf_synlm.training.arguments.corpus import CorpusArguments, is_prepared


@dataclass
class GPSTModelArguments(ModelArguments):
    """GPST, or a baseline without trees."""

    program = "pretrain_gpst"

    architecture: str = option(
        "gpst",
        "Architecture to train. gpst is the default. For a baseline without trees, name the type of a causal "
        "language model of transformers, such as gpt2. Options about trees and the preset are for GPST only.",
    )
    model_preset: str | None = option(
        None,
        "Published size to start from: gpst-small or gpst-medium. By default, the size fits device and text. With "
        "--config-overrides or --model-name-or-path (also in --config), it is gpst-small.",
    )
    document_end_token: bool = option(
        False, "End every document with the end token, so that the model learns when to stop."
    )
    parser_learning_rate: float | None = option(1e-3, "Peak learning rate of the parser, which gives the merge order.")

    @property
    def row(self) -> Architecture:
        """What the table says of the architecture; a model type of transformers is a baseline."""
        rows = ARCHITECTURES[self.program]
        return rows.get(self.architecture, rows["gpt2"])


@dataclass
class DataArguments(CorpusArguments):
    """Where text comes from and how it becomes contexts."""

    prepared: str | None = option(
        None,
        "Folder of prepared text. Missing parts are prepared from the text that you name. If you name no text, the "
        "folder must be complete. By default, it is the folder 'text' in --output-dir.",
    )
    verify_prepared: bool = option(False, "Check the checksums of the prepared text, not only its file sizes.")
    max_sentence_tokens: int | None = option(None, "Leave longer sentences out.")
    keep_words_together: bool = option(
        False, "In training, forbid constituents that split words. The authors allow such constituents."
    )
    context_length: int = option(1024, "Largest number of tokens of a context.", minimum=1)

    def __post_init__(self):
        """Check the values."""
        if self.prepared is not None and not self.names_text and not is_prepared(self.prepared):
            raise ValueError(
                f"{self.prepared} is not a complete folder of prepared text, and no text is named. Correct "
                "--prepared, or name the text to prepare there (--train-files, --dataset-name). For the embedded "
                f"corpus: python training/prepare_text.py --output-dir {self.prepared}"
            )
        super().__post_init__()

    @property
    def location(self) -> str | None:
        """The folder of prepared text, if it is named."""
        return self.prepared


@dataclass
class EvaluationArguments:
    """What is measured during training and at its end."""

    validation_trees: str | None = option(
        None,
        "Treebank file for F1 during training, or 'embedded', or 'none'. Default for the embedded text: 'embedded'. "
        "For other texts: 'none'.",
    )
    test_trees: str | None = option(None, "Treebank file for the final report, or 'embedded', or 'none'.")
    punctuation: Literal["remove", "ignore", "keep"] = option(
        "remove", "Remove punctuation of treebanks before parsing, ignore it in the score, or keep it."
    )
    report_punctuation: list[str] = option(
        ["remove", "keep"],
        "Ways in which the final report treats punctuation. Each way has its own baselines.",
        choices=list(PUNCTUATION),
    )
    max_tree_sentences: int | None = option(None, "Read only this many trees, from the beginning of a treebank.")
    search_num_beams: int = option(20, "Beam of left-to-right parsing in evaluation. 0 turns this off.", minimum=0)
    load_best_model_at_end: bool = option(False, "Save the weights with the best validation loss as the final model.")
    final_report: bool = option(
        False, "At the end, check that the saved model works the same without hf_synlm. Also parse and generate."
    )

    def complete(self, data: DataArguments) -> None:
        """Settle the treebanks; words of validation trees become validation text if all training text is treebanks."""
        default = EMBEDDED if data.is_embedded else "none"
        for name, sample in (("validation_trees", "trees.valid.txt"), ("test_trees", "trees.test.txt")):
            value = getattr(self, name) or default
            setattr(self, name, None if value == "none" else resolve_embedded(value, sample))
        if data.only_trees and not data.has_validation_files and self.validation_trees is not None:
            data.validation_words = [self.validation_trees]

    def methods(self) -> dict[str, dict[str, Any]]:
        """Options of `parse` by name of the kind of trees."""
        methods: dict[str, dict[str, Any]] = {"induced (inside)": {"method": "inside"}}
        if self.search_num_beams:
            methods[f"left to right (beam {self.search_num_beams})"] = {"num_beams": self.search_num_beams}
        return methods


@dataclass(kw_only=True)
class NGramArguments(CorpusArguments):
    """The text, and the longest n-grams."""

    output_dir: str = option(MISSING, "Folder for the model. The prepared text lies in its folder 'text'.")
    order: int = option(3, "Number of tokens in the longest n-grams, from 2 to 5.")
    max_sentence_tokens: int | None = option(None, "Leave longer sentences out.", minimum=1)

    def __post_init__(self):
        """Check the values."""
        super().__post_init__()
        if not 2 <= self.order <= 5:
            raise ValueError(f"order must be from 2 to 5 and is {self.order}.")
        config, of_run = Path(self.output_dir, CONFIG_FILE), Path(self.output_dir, "arguments.json")
        if of_run.exists() or (config.exists() and read_json(config).get("model_type") != "ngram_lm"):
            raise ValueError(f"{self.output_dir!r} holds another model. Choose another --output-dir.")
