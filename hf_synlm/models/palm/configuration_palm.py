# SPDX-License-Identifier: Apache-2.0
"""Configuration of PaLM, the parsing and language model (Peng, Schwartz and Smith, EMNLP 2019), and of AWD-LSTM.

AWD-LSTM (Merity et al., ICLR 2018) is PaLM without its span attention: `span_attention=False`.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.recurrent.configuration_recurrent import AWDConfig

SPAN_SCORES = ("learned", "right_branching")
INPUT_ACTIVATIONS = ("identity", "tanh")

_WIKITEXT2 = {"vocab_size": 33278, "layer_size": 1150, "input_dropout": 0.65, "weight_dropout": 0.5}
# Table 5 of the paper; what it leaves open follows AWD-LSTM, whose published commands the baselines are.
PRESETS: dict[str, dict[str, Any]] = {
    "palm-ptb": {},
    "palm-wikitext2": {**_WIKITEXT2, "num_spans": 10},
    "awd-lstm-ptb": {"span_attention": False, "layer_size": 1150, "hidden_dropout": 0.25, "weight_dropout": 0.5},
    "awd-lstm-wikitext2": {**_WIKITEXT2, "span_attention": False},
}


@strict
class PaLMConfig(AWDConfig):
    """Sizes, attention and regularization of a PaLM; the defaults are the model of the Penn Treebank.

    Sizes:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of the last layer (E); `hidden_size` is the same.
        layer_size: width of the other LSTM layers (H).
        num_layers: number of LSTM layers; the attention stands before the last one.
    Span attention:
        span_attention: False: the baseline without it, AWD-LSTM.
        num_spans: number of spans that a token attends to, those of 1 to K tokens right before it (K). The
            authors' code has one less than its `max_span_length`; the paper says 20 and 10.
        rrnn_size: width of the rational RNN of each direction; span vectors are twice as wide.
        attention_size: width of the layer that scores spans.
        span_scores: "learned"; "right_branching": longer spans score higher, K, K-1, ..., 1 (PaLM-RB).
        input_activation: function of the rational RNN's inputs: "identity" (the authors' code) or "tanh" (the paper).
        output_gate: span vectors are gated by the token that attends, and squashed (the authors' code); False: they are
            the states of the rational RNN themselves (the paper).
        span_attention_weight: weight of the loss on given spans (PaLM-S).
    Regularization (in training):
        embedding_dropout: drops whole rows of the embedding.
        input_dropout: drops features of the embedded tokens; one mask for all positions, as below.
        hidden_dropout: between the layers, and of the parts of the attention.
        output_dropout: drops features of the states that predict the words.
        weight_dropout: drops recurrent weights of the LSTM.
        activation_regularization: weight of the mean square of the (dropped) output.
        temporal_activation_regularization: weight of the mean square of the difference of neighbouring outputs.
    Special tokens: bos_token_id and eos_token_id are the one boundary between sentences; it is read and predicted like
        every other token.
    Presets: "palm-ptb", "palm-wikitext2", "awd-lstm-ptb" and "awd-lstm-wikitext2".

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value. (A value of
            the wrong type raises the `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "palm"
    parse_method = "attention"
    presets = PRESETS
    published_layer_size = 1020
    span_attention: bool = True
    num_spans: int = 20
    rrnn_size: int = 200
    attention_size: int = 100
    span_scores: str = "learned"
    input_activation: str = "identity"
    output_gate: bool = True
    span_attention_weight: float | int = 0.01

    input_dropout: float | int = 0.4
    hidden_dropout: float | int = 0.2
    output_dropout: float | int = 0.4

    @property
    def gives_trees(self) -> bool:
        """False for an AWD-LSTM: trees are read from the attention."""
        return self.span_attention

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self.check_sizes("num_spans", "rrnn_size", "attention_size")
        self.check_regularization()
        self.check_finite("span_attention_weight")
        if self.span_attention and self.num_layers < 2:
            raise ValueError(
                f"num_layers is {self.num_layers}, but the span attention lies between two layers. Set num_layers to "
                "2 or more, or set span_attention=False."
            )
        self.check_choices(span_scores=SPAN_SCORES, input_activation=INPUT_ACTIVATIONS)
