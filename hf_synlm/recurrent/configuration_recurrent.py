# SPDX-License-Identifier: Apache-2.0
"""Bases of the configurations of ON-LSTM, PRPN and PaLM."""

from typing import Any, ClassVar, Self

from hf_synlm.core.configuration_base import SyntacticConfig


class RecurrentConfig(SyntacticConfig):
    """Base of the configurations of ON-LSTM, PRPN and PaLM.

    `hidden_size` is the width of `last_hidden_state`, as elsewhere in transformers: another name of `embedding_size`.
    In files of earlier versions it was the width of the layers: where `layer_size` is missing, `hidden_size` is taken.

    Fields:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of the features that predict the words (E).
        layer_size: width of the other layers (H); None = that of the published model.
        num_layers: number of layers (L).
        bos_token_id, eos_token_id: the one boundary between sentences; it is read and predicted like other tokens.
    """

    attribute_map = {"num_hidden_layers": "num_layers", "hidden_size": "embedding_size"}
    published_layer_size: ClassVar[int] = 1150

    vocab_size: int = 10000
    embedding_size: int = 400
    layer_size: int | None = None
    num_layers: int = 3
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        if kwargs.get("hidden_size", 0) is None:
            raise ValueError("hidden_size is null. Give a number, or leave hidden_size out.")
        earlier = kwargs.pop("hidden_size", None)
        if self.layer_size is None:
            self.layer_size = self.published_layer_size if earlier is None else earlier
        elif earlier not in (None, self.embedding_size):
            raise ValueError(
                f"hidden_size is {earlier}, embedding_size {self.embedding_size}, layer_size {self.layer_size}. "
                "hidden_size is another name of embedding_size. Set only embedding_size and layer_size."
            )
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """As of the base class; `hidden_size` alone replaces `layer_size`, as in earlier versions."""
        if overrides.get("hidden_size") is not None and "layer_size" not in overrides:
            overrides["layer_size"] = overrides.pop("hidden_size")
        return super().from_preset(name, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """The fields, and `hidden_size` for those that read files (PEFT)."""
        return {**super().to_dict(), "hidden_size": self.embedding_size}

    def check_sizes(self, *names: str) -> None:
        """Raise ValueError for bad sizes, the fields `names` included, and bad special tokens."""
        self.check_least(1, "vocab_size", "embedding_size", "layer_size", "num_layers", *names)


class AWDConfig(RecurrentConfig):
    """Base of the configurations of ON-LSTM and PaLM: the regularization of AWD-LSTM (Merity et al., ICLR 2018).

    Fields:
        embedding_dropout: drops whole rows of the embedding.
        input_dropout: drops features of the embedded tokens; one mask for all positions, as below.
        hidden_dropout: between the layers.
        output_dropout: drops features of the states that predict the words.
        weight_dropout: drops recurrent weights.
        activation_regularization: weight of the mean square of the output.
        temporal_activation_regularization: weight of the mean square of the difference of neighbouring outputs.
    """

    penalizes_activations = True
    embedding_dropout: float | int = 0.1
    input_dropout: float | int = 0.5
    hidden_dropout: float | int = 0.3
    output_dropout: float | int = 0.45
    weight_dropout: float | int = 0.45
    activation_regularization: float | int = 2.0
    temporal_activation_regularization: float | int = 1.0

    @property
    def layer_sizes(self) -> list[int]:
        """Width of every layer; the last one is as wide as the embedding, which the words are predicted with."""
        return [self.layer_size] * (self.num_layers - 1) + [self.embedding_size]

    def check_regularization(self) -> None:
        """Raise ValueError for bad rates of dropout and weights of penalties."""
        self.check_finite("activation_regularization", "temporal_activation_regularization")
