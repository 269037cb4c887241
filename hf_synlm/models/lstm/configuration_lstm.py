# SPDX-License-Identifier: Apache-2.0
"""Configuration of the LSTM language model, the baseline without trees that the RNNG is compared with."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.core.configuration_base import SyntacticConfig

# The vocabularies and embedding sizes of the published RNNGs; wider states make up for the parts that an LSTM lacks, so
# that the numbers of parameters agree.
PRESETS: dict[str, dict[str, Any]] = {
    "lstm-15m": {},
    "lstm-35m": {"vocab_size": 30720, "embedding_size": 656, "hidden_size": 992},
}


@strict
class LSTMConfig(SyntacticConfig):
    """Sizes and special tokens of an LSTM language model; the defaults are as large as the smaller published RNNG.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding, which is the output embedding, too (w).
        hidden_size: width of the LSTM states (h).
        num_layers: number of LSTM layers (L).
    Training:
        dropout: of the token embeddings, between the layers, and before the output projection.
        initializer_range: all parameters are drawn from U(-x, x). `None` leaves PyTorch's defaults, as the authors of
            the RNNG do: embeddings (and so the output layer) from N(0, 1), the rest from U(-1/sqrt(h), 1/sqrt(h)).
    Special tokens:
        bos_token_id: the begin token; the first step of every row reads its embedding.
        pad_token_id, eos_token_id: as usual. Nothing is predicted after the last word of a sentence, so an end token is
            learned only if the text itself contains it.
    Presets: "lstm-15m" and "lstm-35m", with as many parameters as the published RNNGs.

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "lstm_lm"
    presets = PRESETS
    model_classes = ("Model", "ForCausalLM")
    sentence_end = "none"
    attribute_map = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 50000
    embedding_size: int = 256
    hidden_size: int = 384
    num_layers: int = 2
    dropout: float | int = 0.1
    initializer_range: float | int | None = None

    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = 0

    @property
    def gives_trees(self) -> bool:
        """False."""
        return False

    def validate_architecture(self) -> None:
        """Check that the fields are in range (called at construction and before saving)."""
        self.check_least(1, "vocab_size", "embedding_size", "hidden_size", "num_layers")
        if self.initializer_range is not None:
            self.check_finite("initializer_range", positive=True)
        if self.bos_token_id is None:
            raise ValueError("bos_token_id is None, but the first step reads its embedding. Set bos_token_id.")
