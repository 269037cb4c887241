# SPDX-License-Identifier: Apache-2.0
"""Configuration of RNNG, the recurrent neural network grammar, in its batched form (Noji and Oseki, ACL Findings 2021).

One flat dataclass: sizes, transition system and composition, the labels of the nonterminals, and the search.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.search.labeled.configuration import LabeledTreeConfig

TRANSITION_SYSTEMS = ("top_down", "in_order")
COMPOSITIONS = ("lstm", "attention")

# Sizes published with the paper: a word model of 15 M parameters and a subword model of 35 M.
PRESETS: dict[str, dict[str, Any]] = {
    "rnng-15m": {},
    "rnng-35m": {"vocab_size": 30720, "embedding_size": 656, "hidden_size": 656, "subwords": True},
}


@strict
class RNNGConfig(LabeledTreeConfig):
    """Sizes, transition system and search of an RNNG; the defaults are the published model of 15 M parameters.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of words, labels and composed vectors (w).
        hidden_size: width of the stack LSTM (h).
        num_layers: layers of the stack LSTM.
        dropout: on embeddings, between the layers of the stack LSTM, before the output layer, and in the composition.
        initializer_range: draw all parameters from U(-x, x); None: as PyTorch does (the authors' default).
    Structure:
        transition_system: "top_down" (labels before their children) or "in_order" (left-corner: after the first child).
        composition: "lstm" or "attention".
        max_consecutive_nonterminals: nonterminals opened in a row without a word between (in_order: also unary chains);
            None = 8 for top_down, 3 for in_order, as the authors' search.
    Special tokens: pad_token_id is never a word (its row is trained like that of a word which never comes). It is also
        the begin and end token (bos_token_id, eos_token_id), because sentences begin and end with their tree.
    Presets: "rnng-15m" and "rnng-35m".

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value. (A value of
            the wrong type raises the `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "rnng"
    presets = PRESETS
    attribute_map = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 50000
    embedding_size: int = 256
    hidden_size: int = 256
    num_layers: int = 2
    dropout: float | int = 0.1
    initializer_range: float | int | None = None

    transition_system: str = "top_down"
    composition: str = "lstm"
    max_consecutive_nonterminals: int | None = None
    bos_token_id: int | None = 0

    @property
    def in_order(self) -> bool:
        """Whether the transition system is the in-order one."""
        return self.transition_system == "in_order"

    @property
    def consecutive_limit(self) -> int:
        """`max_consecutive_nonterminals`, or its default."""
        return self.max_consecutive_nonterminals or (3 if self.in_order else 8)

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self.check_least(1, "vocab_size", "embedding_size", "hidden_size", "num_layers")
        if self.max_consecutive_nonterminals is not None:
            self.check_least(1, "max_consecutive_nonterminals")
        if self.initializer_range is not None:
            self.check_finite("initializer_range", positive=True)
        self.check_choices(transition_system=TRANSITION_SYSTEMS, composition=COMPOSITIONS)
        self.check_search()
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings is False, but this model ties them. Set tie_word_embeddings=True.")
