# SPDX-License-Identifier: Apache-2.0
"""Configuration of URNNG, the unsupervised recurrent neural network grammar (Kim et al., NAACL 2019)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.core.configuration_base import SyntacticConfig

# The published size, with the vocabulary of the Penn Treebank as the authors cut it.
PRESETS: dict[str, dict[str, Any]] = {"urnng-ptb": {}}


@strict
class URNNGConfig(SyntacticConfig):
    """Sizes and search of a URNNG; the defaults are those of the authors.

    Sizes:
        vocab_size: number of token ids (V).
        hidden_size: width of words, composed vectors and states of the stack LSTM (h).
        num_layers: layers of the stack LSTM.
        dropout: on embeddings, between the layers of the stack LSTM, and before the heads.
        initializer_range: all parameters are drawn from U(-x, x).
    Search:
        scoring_num_beams: beam of `forward(...).logits` and default beam of `parse`.
        output_marginal_logits: in evaluation mode, return `logits` also with actions, so that Trainer's `predict` and
            `compute_metrics` see them. They cost a search per batch, many times the loss.
    Special tokens:
        bos_token_id: the token that the stack LSTM reads first.
        eos_token_id: the last token of a sentence, if the text has one: the right part of the whole tree.
        pad_token_id: never a word.
    Presets: "urnng-ptb".

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "urnng"
    presets = PRESETS
    searches = True
    tree_codec = "actions"
    model_classes = ("Model", "ForCausalLM")
    attribute_map = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 23819
    hidden_size: int = 650
    num_layers: int = 2
    dropout: float | int = 0.5
    initializer_range: float | int = 0.1

    scoring_num_beams: int = 10
    output_marginal_logits: bool = False

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_id: int | None = 2

    def validate_architecture(self) -> None:
        """Check that the fields are in range (called at construction and before saving)."""
        self.check_least(1, "vocab_size", "hidden_size", "num_layers", "scoring_num_beams")
        self.check_finite("initializer_range", positive=True)
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings is False, but this model ties them. Set tie_word_embeddings=True.")
