# SPDX-License-Identifier: Apache-2.0
"""Configuration of the span parser: its encoder, its labels and tags."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from hf_synlm.core.configuration_base import SyntacticConfig


@strict
class SpanParserConfig(SyntacticConfig):
    """Encoder, labels and sizes of a span parser (see `SpanParserForTokenClassification.from_encoder`).

    Sizes:
        encoder_config: configuration of an encoder of transformers (BERT, RoBERTa, ...).
        nonterminals: labels of constituents. Those of a unary chain are one label, the top first: "S VP".
        tags: parts of speech.
        span_hidden_size: width of the layer that scores spans.
        dropout: of the inputs of the heads; the encoder has none.
        adapter_of: in a folder with an adapter, name and fingerprint of the encoder whose weights it leaves out.
        vocab_size: that of the encoder.
    Special tokens:
        bos_token_id, eos_token_id: tokens that the encoder reads before and after a sentence (CLS and SEP of BERT).
        pad_token_id: never a part of a word.

    Raises:
        ValueError: a field is out of range; the message names the value.
    """

    model_type = "span_parser"
    parse_method = "CKY"
    gives_labels = gives_tags = True
    model_classes = ("ForTokenClassification",)
    has_positions = True
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: dict | PreTrainedConfig | None = None
    nonterminals: list[str] | None = None
    tags: list[str] | None = None
    span_hidden_size: int = 256
    dropout: float | int = 0.1
    adapter_of: dict | None = None
    vocab_size: int = 30522
    bos_token_id: int | None = 101
    eos_token_id: int | None = 102
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any):
        if not isinstance(self.encoder_config, PreTrainedConfig):
            self.encoder_config = AutoConfig.for_model(**{"model_type": "bert", **(self.encoder_config or {})})
        self.encoder_config._name_or_path = ""  # the folder of a user's machine
        self.nonterminals, self.tags = list(self.nonterminals or ["S"]), list(self.tags or ["X"])
        positions = getattr(self.encoder_config, "max_position_embeddings", None)
        if positions is not None:  # most tokens of a sentence, with begin and end
            kwargs["max_position_embeddings"] = positions
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check that the fields are in range (called at construction and before saving)."""
        self.check_least(1, "span_hidden_size", "vocab_size")
        if self.bos_token_id is None or self.eos_token_id is None or self.pad_token_id is None:
            raise ValueError("bos_token_id, eos_token_id and pad_token_id must be ids, because an encoder reads them.")
