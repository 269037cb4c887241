"""Configuration of the LSTM language model, the baseline without trees that the RNNG is compared with."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# The vocabularies and embedding sizes of the published RNNGs; wider states make up for the parts that an LSTM lacks, so
# that the numbers of parameters agree.
PRESETS: dict[str, dict[str, Any]] = {
    "lstm-15m": {},
    "lstm-35m": {"vocab_size": 30720, "embedding_size": 656, "hidden_size": 992},
}


@strict
class LSTMConfig(PreTrainedConfig):
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
        bos_token_id: the begin token; its embedding is what the first step reads in every row.
        pad_token_id, eos_token_id: as usual. Nothing is predicted after the last word of a sentence, so an end token
            is learned only where the text itself contains it.

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "lstm_lm"
    keys_to_ignore_at_inference = ["past_key_values", "losses", "joint_log_prob"]
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
    auto_map: dict | None = None

    def __post_init__(self, **kwargs):
        if self.auto_map is None:
            self.auto_map = {
                "AutoConfig": "configuration_lstm.LSTMConfig",
                "AutoModel": "modeling_lstm.LSTMModel",
                "AutoModelForCausalLM": "modeling_lstm.LSTMForCausalLM",
            }
        # The decorator wraps errors of its own validation round in its own type; users catch a plain ValueError.
        self.validate_architecture()
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "LSTMConfig":
        """Configuration with as many parameters as a published RNNG.

        Args:
            name: "lstm-15m" or "lstm-35m".
            **overrides: fields that replace the preset's values.

        Returns:
            The configuration.

        Raises:
            ValueError: when there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no LSTM preset {name!r}. Choose one of {sorted(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    def validate_architecture(self) -> None:
        """Check that the fields are in range (called at construction and before saving)."""
        for name in ("vocab_size", "embedding_size", "hidden_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1) and is {self.dropout}.")
        if self.initializer_range is not None and not 0 < self.initializer_range < math.inf:
            raise ValueError(
                f"initializer_range must be a finite positive number (or None) and is {self.initializer_range}."
            )
        if self.bos_token_id is None:
            raise ValueError("bos_token_id is None, but the first step reads its embedding. Set bos_token_id.")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name} {value} is outside the vocabulary of {self.vocab_size} ids. "
                    f"Set {name} to an id below vocab_size."
                )


__all__ = ["LSTMConfig"]
