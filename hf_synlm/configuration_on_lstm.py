"""Configuration of ON-LSTM (Shen et al., ICLR 2019) and of its supervised variant ONLSTM-SYD (Du et al., ACL 2020)."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

DISTANCE_HEADS = ("split", "shared", "hidden")
SYNTACTIC_DISTANCE_SCOPES = ("sentence", "batch")
SYNTACTIC_DISTANCE_REDUCTIONS = ("mean", "sum")

_SYD: dict[str, Any] = {"supervised_layers": [2], "embedding_dropout": 0.125}
# The commands of the authors' README files and the defaults of their scripts; "paper" is what Du et al. write instead:
# pairs inside a sentence, summed, distances of 0 to 40 (the number of chunks of the third layer), weight 0.75.
PRESETS: dict[str, dict[str, Any]] = {
    "on-lstm-ptb": {},
    "on-lstm-syd-ptb": {
        **_SYD,
        "syntactic_distance_scope": "batch",
        "syntactic_distance_reduction": "mean",
        "syntactic_distance_weight": 1.0,
    },
    "on-lstm-syd-ptb-paper": {
        **_SYD,
        "syntactic_distance_scope": "sentence",
        "syntactic_distance_reduction": "sum",
        "syntactic_distance_scale": 40.0,
    },
}


@strict
class ONLSTMConfig(PreTrainedConfig):
    """Sizes, regularization and supervision of an ON-LSTM; the defaults are the word model of the Penn Treebank.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of the last layer (E).
        hidden_size: width of the other layers (H).
        num_layers: number of layers (L).
        chunk_size: units that share a pair of master gates (k); it divides the widths of all layers.
    Regularization (in training):
        embedding_dropout: of whole rows of the embedding.
        input_dropout: of the embedded tokens; here and below the same mask at all positions.
        hidden_dropout: between the layers.
        output_dropout: of the states that the words are predicted from.
        weight_dropout: of the recurrent weights. They are not rescaled in training; evaluation multiplies them by what
            is kept on average, so that this number belongs to a trained model as its weights do.
        activation_regularization: weight of the mean square of the output (before its dropout).
        temporal_activation_regularization: weight of the mean square of the difference of neighbouring outputs.
    Supervised distances (ONLSTM-SYD):
        supervised_layers: layers whose distances learn from gold trees; None = no supervision.
        syntactic_distance_head: what learns from gold trees: "split" (a second master forget gate on top of the
            first), "shared" (the distances of the language model: one set of trees), or "hidden" (a linear function of
            the states: vanilla multitasking).
        language_model_weight: weight of the language model's loss, regularization included.
        syntactic_distance_weight: weight of the ranking loss.
        syntactic_distance_margin: by how much two distances shall differ.
        syntactic_distance_scope: pairs inside a "sentence" (the paper), or across the "batch" (the released code).
        syntactic_distance_reduction: "mean" or "sum" over the pairs.
        syntactic_distance_scale: factor of the distances, which lie in [0, 1), before they are compared.
    Special tokens: bos_token_id and eos_token_id are the one boundary between sentences; it is read and predicted like
        every other token.

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value. (A value of
            the wrong type raises the `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "on_lstm"
    keys_to_ignore_at_inference = ["past_key_values", "losses", "joint_log_prob", "distances", "syd_distances"]
    attribute_map = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 10000
    embedding_size: int = 400
    hidden_size: int = 1150
    num_layers: int = 3
    chunk_size: int = 10

    embedding_dropout: float | int = 0.1
    input_dropout: float | int = 0.5
    hidden_dropout: float | int = 0.3
    output_dropout: float | int = 0.45
    weight_dropout: float | int = 0.45
    activation_regularization: float | int = 2.0
    temporal_activation_regularization: float | int = 1.0

    supervised_layers: list[int] | None = None
    syntactic_distance_head: str = "split"
    language_model_weight: float | int = 1.0
    syntactic_distance_weight: float | int = 0.75
    syntactic_distance_margin: float | int = 1.0
    syntactic_distance_scope: str = "sentence"
    syntactic_distance_reduction: str = "mean"
    syntactic_distance_scale: float | int = 1.0

    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = None
    auto_map: dict | None = None

    def __post_init__(self, **kwargs):
        if self.auto_map is None:
            self.auto_map = {
                "AutoConfig": "configuration_on_lstm.ONLSTMConfig",
                "AutoModel": "modeling_on_lstm.ONLSTMModel",
                "AutoModelForCausalLM": "modeling_on_lstm.ONLSTMForCausalLM",
                "AutoModelForSequenceClassification": "modeling_on_lstm.ONLSTMForSequenceClassification",
            }
        # The decorator wraps errors of its own validation round in its own type; users catch a plain ValueError.
        self.validate_architecture()
        super().__post_init__(**kwargs)

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of the layers' states."""
        return [self.hidden_size] * (self.num_layers - 1) + [self.embedding_size]

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "ONLSTMConfig":
        """Configuration of a published model.

        Args:
            name: "on-lstm-ptb", "on-lstm-syd-ptb" (as released) or "on-lstm-syd-ptb-paper" (as written).
            **overrides: fields that replace the preset's values.

        Returns:
            The configuration.

        Raises:
            ValueError: when there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no ON-LSTM preset {name!r}. Choose one of {sorted(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        for name in "vocab_size embedding_size hidden_size num_layers chunk_size".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")
        for size in set(self.layer_sizes):
            if size % self.chunk_size:
                raise ValueError(f"chunk_size {self.chunk_size} does not divide the width {size} of a layer.")
        for name in ("embedding", "input", "hidden", "output", "weight"):
            value = getattr(self, f"{name}_dropout")
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}_dropout must be in [0, 1) and is {value}.")
        for name in (
            "activation_regularization temporal_activation_regularization language_model_weight "
            "syntactic_distance_weight syntactic_distance_margin syntactic_distance_scale"
        ).split():
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number, not negative, and is {getattr(self, name)}.")
        for name, choices in (
            ("syntactic_distance_head", DISTANCE_HEADS),
            ("syntactic_distance_scope", SYNTACTIC_DISTANCE_SCOPES),
            ("syntactic_distance_reduction", SYNTACTIC_DISTANCE_REDUCTIONS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown. Choose one of {list(choices)}.")
        layers = self.supervised_layers
        if layers is not None and (not layers or sorted(set(layers) & set(range(self.num_layers))) != sorted(layers)):
            raise ValueError(f"supervised_layers must be distinct numbers below {self.num_layers} and are {layers}.")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name} {value} is outside the vocabulary of {self.vocab_size} ids. "
                    f"Set {name} to an id below vocab_size."
                )


__all__ = ["ONLSTMConfig"]
