# SPDX-License-Identifier: Apache-2.0
"""Configuration of ON-LSTM (Shen et al., ICLR 2019) and of its supervised variant ON-LSTM-SYD (Du et al., ACL 2020)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.recurrent.configuration_distances import SyntacticDistanceConfig
from hf_synlm.recurrent.configuration_recurrent import AWDConfig

DISTANCE_HEADS = ("split", "shared", "hidden")

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
class ONLSTMConfig(AWDConfig, SyntacticDistanceConfig):
    """Sizes, regularization and supervision of an ON-LSTM; the defaults are the word model of the Penn Treebank.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of the last layer (E); `hidden_size` is the same.
        layer_size: width of the other layers (H).
        num_layers: number of layers (L).
        chunk_size: units that share a pair of master gates (k); the widths of all layers are multiples of it.
    Regularization (in training):
        embedding_dropout: drops whole rows of the embedding.
        input_dropout: drops features of the embedded tokens; one mask for all positions, as below.
        hidden_dropout: between the layers.
        output_dropout: drops features of the states that predict the words.
        weight_dropout: drops recurrent weights. They are not rescaled in training; evaluation multiplies them by the
            share that is kept. So a trained model needs the number that it was trained with.
        activation_regularization: weight of the mean square of the output (before its dropout).
        temporal_activation_regularization: weight of the mean square of the difference of neighbouring outputs.
    Supervised distances (ON-LSTM-SYD):
        supervised_layers: layers whose distances learn from gold trees; None = no supervision.
        syntactic_distance_head: the distances that learn from gold trees: "split" (a second master forget gate on top
            of the first), "shared" (the distances of the language model: one set of trees), or "hidden" (a linear
            function of the states: vanilla multitasking).
        language_model_weight: weight of the language model's loss, regularization included.
        syntactic_distance_weight, _margin, _scope, _reduction, _scale: see `SyntacticDistanceConfig`.
    Special tokens: bos_token_id and eos_token_id are the one boundary between sentences; it is read and predicted like
        every other token.
    Presets: "on-lstm-ptb", "on-lstm-syd-ptb" (as released) and "on-lstm-syd-ptb-paper" (as written).

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value. (A value of
            the wrong type raises the `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "on_lstm"
    presets = PRESETS
    chunk_size: int = 10

    supervised_layers: list[int] | None = None
    syntactic_distance_head: str = "split"

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self.check_sizes("chunk_size")
        for size in set(self.layer_sizes):
            if size % self.chunk_size:
                raise ValueError(f"chunk_size {self.chunk_size} does not divide the width {size} of a layer.")
            if size == self.chunk_size:
                raise ValueError(
                    f"chunk_size {self.chunk_size} is the width of a layer. With one chunk there is nothing to "
                    "order, and the cell never changes. Set chunk_size to half of this width or less."
                )
        self.check_regularization()
        self.check_choices(syntactic_distance_head=DISTANCE_HEADS)
        self.check_supervision()
        layers = self.supervised_layers
        if layers is not None and (not layers or sorted(set(layers) & set(range(self.num_layers))) != sorted(layers)):
            raise ValueError(f"supervised_layers must be different numbers below {self.num_layers} and are {layers}.")
