"""Configuration of PRPN, the Parsing-Reading-Predict Network (Shen et al., 2018), and of PRPN-SYD (Du et al., 2020)."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

GATES = ("hard", "soft")
PARSING_NETWORKS = ("convolution", "recurrent")
BATCH_NORM_INITS = ("uniform", "ones")
SYNTACTIC_DISTANCE_SCOPES = ("sentence", "batch")
SYNTACTIC_DISTANCE_REDUCTIONS = ("mean", "sum")

# Section 6 of the paper. Its scripts exist for PTB words (main_LM.py) and for WSJ10 (main_UP.py); of text8 it says that
# it has the hyper-parameters of PTB characters and these dropouts. Of PRPN-SYD no sizes are published: they are PRPN's.
_CHARACTERS: dict[str, Any] = {
    "embedding_size": 128,
    "hidden_size": 1024,
    "num_lookback": 10,
    "num_slots": 20,
    "num_residual_blocks": 1,
    "tie_word_embeddings": False,
}
PRESETS: dict[str, dict[str, Any]] = {
    "prpn-ptb-word": {},
    "prpn-ptb-character": {
        **_CHARACTERS,
        "vocab_size": 50,
        "dropout": 0.0,
        "input_dropout": 0.25,
        "recurrent_dropout": 0.1,
    },
    "prpn-text8": {
        **_CHARACTERS,
        "vocab_size": 44000,
        "dropout": 0.4,
        "input_dropout": 0.2,
        "recurrent_dropout": 0.2,
    },
    "prpn-wsj10": {
        "vocab_size": 15856,
        "embedding_size": 200,
        "hidden_size": 400,
        "dropout": 0.2,
        "input_dropout": 0.2,
        "recurrent_dropout": 0.0,
        "pad_aware_batch_norm": False,
    },
    "prpn-syd": {"parsing_network": "recurrent"},
}


@strict
class PRPNConfig(PreTrainedConfig):
    """Sizes, gates and dropout of a PRPN; the defaults are the word model of the Penn Treebank.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of the features before the output layer (E).
        hidden_size: width of the reading network's states (H); even, as each of two distances reads one half of the
            parsing network's features.
        num_layers: layers of the reading network.
        num_slots: states before a token that reading and predicting may attend to (N).
        num_lookback: tokens before a token that its distance reads (L); 0 = the token alone.
        num_residual_blocks: residual blocks of the predict network.
    Gates:
        gate: "hard", clamp((a - b) / resolution + 1, 0, 1), or "soft", sigmoid(10 (a - b) / resolution + 5).
        resolution: difference of two distances that closes a gate.
    Dropout:
        dropout: of the token embeddings where the reading network reads them, and of the features before the output
            layer.
        input_dropout: everywhere else outside the recurrence: parsing network, attention keys, between the layers,
            predict network.
        recurrent_dropout: of what the LSTM reads from its past, one mask of H units per layer and call.
    Batch normalization:
        pad_aware_batch_norm: statistics in training are those of tokens only. False counts padding, too, as the authors
            do: then padding changes what is trained.
        batch_norm_init: scales start from U(0, 1) ("uniform", which is what PyTorch did when the authors used it) or
            from 1 ("ones").
    Supervised distances (PRPN-SYD, a reconstruction: see `parser_prpn`):
        parsing_network: "convolution" (PRPN), or "recurrent" (PRPN-SYD), which has a second set of distances for
            supervision.
        language_model_weight: weight of the language model's loss.
        syntactic_distance_weight: weight of the ranking loss.
        syntactic_distance_margin: by how much two distances shall differ.
        syntactic_distance_scope: pairs inside a "sentence" (the paper), or across the "batch" (the code of ONLSTM-SYD).
        syntactic_distance_reduction: "mean" or "sum" over the pairs.
        syntactic_distance_scale: factor of the distances, which lie in (0, 1), before they are compared.
    Special tokens: bos_token_id and eos_token_id mark the boundary of sentences, which is a token like any other.

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "prpn"
    keys_to_ignore_at_inference = ["past_key_values", "losses", "distances", "syd_distances"]
    attribute_map = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 10000
    embedding_size: int = 800
    hidden_size: int = 1200
    num_layers: int = 2
    num_slots: int = 15
    num_lookback: int = 5
    num_residual_blocks: int = 0

    gate: str = "hard"
    resolution: float | int = 0.1

    dropout: float | int = 0.7
    input_dropout: float | int = 0.5
    recurrent_dropout: float | int = 0.5

    pad_aware_batch_norm: bool = True
    batch_norm_init: str = "uniform"

    parsing_network: str = "convolution"
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
                "AutoConfig": "configuration_prpn.PRPNConfig",
                "AutoModel": "modeling_prpn.PRPNModel",
                "AutoModelForCausalLM": "modeling_prpn.PRPNForCausalLM",
                "AutoModelForSequenceClassification": "modeling_prpn.PRPNForSequenceClassification",
            }
        # The decorator wraps errors of its own validation round in its own type; users catch a plain ValueError.
        self.validate_architecture()
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "PRPNConfig":
        """Configuration of a published model.

        Args:
            name: "prpn-ptb-word", "prpn-ptb-character", "prpn-text8", "prpn-wsj10" (unsupervised parsing), or
                "prpn-syd".
            **overrides: fields that replace the preset's values.

        Returns:
            The configuration.

        Raises:
            ValueError: when there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no PRPN preset {name!r}. Choose one of {sorted(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        for name in ("vocab_size", "embedding_size", "hidden_size", "num_layers", "num_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")
        for name in ("num_lookback", "num_residual_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative and is {getattr(self, name)}.")
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size must be even and is {self.hidden_size}: each distance reads one half of it.")
        for name in ("dropout", "input_dropout", "recurrent_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1) and is {getattr(self, name)}.")
        if not 0.0 < self.resolution <= 100.0:
            raise ValueError(f"resolution must be in (0, 100] and is {self.resolution}; distances lie in (0, 1).")
        if not 0.0 < self.syntactic_distance_scale < math.inf:
            raise ValueError(
                f"syntactic_distance_scale must be a finite positive number and is {self.syntactic_distance_scale}."
            )
        for name in ("language_model_weight", "syntactic_distance_weight", "syntactic_distance_margin"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number, not negative, and is {getattr(self, name)}.")
        for name, choices in (
            ("gate", GATES),
            ("batch_norm_init", BATCH_NORM_INITS),
            ("parsing_network", PARSING_NETWORKS),
            ("syntactic_distance_scope", SYNTACTIC_DISTANCE_SCOPES),
            ("syntactic_distance_reduction", SYNTACTIC_DISTANCE_REDUCTIONS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown. Choose one of {list(choices)}.")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name} {value} is outside the vocabulary of {self.vocab_size} ids. "
                    f"Set {name} to an id below vocab_size."
                )


__all__ = ["PRPNConfig"]
