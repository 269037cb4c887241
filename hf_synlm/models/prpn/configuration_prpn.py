# SPDX-License-Identifier: Apache-2.0
"""Configuration of PRPN, the Parsing-Reading-Predict Network (Shen et al., 2018), and of PRPN-SYD (Du et al., 2020)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.recurrent.configuration_distances import SyntacticDistanceConfig

GATES = ("hard", "soft")
PARSING_NETWORKS = ("convolution", "recurrent")
BATCH_NORM_INITS = ("uniform", "ones")

# Section 6 of the paper. Its scripts exist for PTB words (main_LM.py) and for WSJ10 (main_UP.py); of text8 it says that
# it has the hyper-parameters of PTB characters and these dropouts. Of PRPN-SYD no sizes are published: they are PRPN's.
_CHARACTERS: dict[str, Any] = {
    "embedding_size": 128,
    "layer_size": 1024,
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
        "layer_size": 400,
        "dropout": 0.2,
        "input_dropout": 0.2,
        "recurrent_dropout": 0.0,
        "pad_aware_batch_norm": False,
    },
    "prpn-syd": {"parsing_network": "recurrent"},
}


@strict
class PRPNConfig(SyntacticDistanceConfig):
    """Sizes, gates and dropout of a PRPN; the defaults are the word model of the Penn Treebank.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of the features before the output layer (E).
        layer_size: width of the reading network's states (H); even, as each of two distances reads one half of the
            parsing network's features.
        num_layers: layers of the reading network.
        num_slots: states before a token that reading and predicting may attend to (N).
        num_lookback: tokens before a token that its distance reads (L); 0 = the token alone.
        num_residual_blocks: residual blocks of the predict network.
    Gates:
        gate: "hard", clamp((a - b) / resolution + 1, 0, 1), or "soft", sigmoid(10 (a - b) / resolution + 5).
        resolution: difference of two distances that closes a gate.
    Dropout:
        dropout: of the token embeddings where the first LSTM layer reads them (its attention key reads them under
            input_dropout), and of the features before the output layer.
        input_dropout: everywhere else outside the recurrence: parsing network, attention keys, between the layers,
            predict network.
        recurrent_dropout: of the LSTM's inputs from its past, one mask of H units per layer and call.
    Batch normalization:
        pad_aware_batch_norm: statistics in training are those of tokens only. False counts padding, too, as the authors
            do: then padding changes what is trained.
        batch_norm_init: scales start from U(0, 1) ("uniform", which is what PyTorch did when the authors used it) or
            from 1 ("ones").
    Supervised distances (PRPN-SYD, a reconstruction: see models/prpn/parser.py):
        parsing_network: "convolution" (PRPN), or "recurrent" (PRPN-SYD), which has a second set of distances for
            supervision.
        language_model_weight: weight of the language model's loss.
        syntactic_distance_weight, _margin, _scope, _reduction, _scale: see `SyntacticDistanceConfig`.
    Special tokens: bos_token_id and eos_token_id mark the boundary of sentences, which is a token like any other.
    Presets: "prpn-ptb-word", "prpn-ptb-character", "prpn-text8", "prpn-wsj10" (unsupervised parsing) and "prpn-syd".

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "prpn"
    presets = PRESETS
    published_layer_size = 1200

    embedding_size: int = 800
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

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self.check_sizes("num_slots")
        self.check_least(0, "num_lookback", "num_residual_blocks")
        if self.layer_size % 2:
            raise ValueError(f"layer_size {self.layer_size} must be even, because each distance reads half of it.")
        if not 0.0 < self.resolution <= 100.0:
            raise ValueError(f"resolution must be in (0, 100] and is {self.resolution}. (Distances lie in (0, 1).)")
        self.check_choices(gate=GATES, batch_norm_init=BATCH_NORM_INITS, parsing_network=PARSING_NETWORKS)
        self.check_supervision()
