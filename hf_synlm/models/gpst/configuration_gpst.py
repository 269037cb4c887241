# SPDX-License-Identifier: Apache-2.0
"""Configuration of GPST, the generative pretrained structured transformer (Hu et al., ACL 2024).

One flat dataclass: sizes of the five parts (parser, composition, decomposition, type layers, token layers), the
training objective with every ablation of the paper, and the special token ids.
"""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from hf_synlm.core.configuration_base import SyntacticConfig

HEIGHT_LOSSES = ("sentence", "shipped", "paper")

# Sizes published with the paper; the vocabulary is the authors' GPT-2 byte-level BPE with seven extra tokens.
PRESETS: dict[str, dict[str, Any]] = {
    "gpst-small": {},
    "gpst-medium": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_token_layers": 21,
        "composition_size": 512,
        "composition_num_heads": 16,
        "composition_intermediate_size": 2048,
        "parser_size": 256,
        "parser_score_size": 1024,
    },
}


@strict
class GPSTConfig(SyntacticConfig):
    """Sizes, objective and special tokens of a GPST model; the defaults are the published small model (144 M).

    Sizes:
        vocab_size: number of token ids (V).
        hidden_size: width of the type and token layers (D).
        num_attention_heads: attention heads of the type and token layers.
        num_type_layers: layers that read the stack top at every action and decide between GEN and COMP.
        num_token_layers: layers that read one slot per token and predict the token.
        intermediate_size: feed-forward width of both; `None` means 4 D.
        max_position_embeddings: longest context in tokens. Positions count tokens, not actions; the position after the
            last token has an embedding, too, so the table has one row more.
        activation_function: function in the type and token layers. "gelu_pytorch_tanh" is the same function as the
            authors' "gelu_new", computed by one fused kernel.
        composition_size: width of the composition model (d); composition_num_heads, composition_intermediate_size
            and num_composition_layers / num_decomposition_layers describe its two encoders.
        score_size: width of the projections whose product scores a split.
        window_size: pruning window W of the chart. A cell is encoded once it spans at most W super tokens.
        parser_size, parser_score_size, num_parser_layers, parser_num_heads: the Transformer parser that gives
            the merge order.
        head_expansion: the hidden layers of the token and auto-encoding heads are this many times as wide as their
            inputs.
    Structure:
        merge_noise: coefficient of the Gumbel noise on split scores in training mode (0 = deterministic order).
        split_temperature: temperature of the softmax over the splits of a cell.
        hard_inside: straight-through one-hot split weights instead of the softmax.
        accumulate_scores: add the children's inside scores (and the parent's and sibling's outside scores) to the
            split scores, as the paper's equations do. The authors' code scores each split alone (default).
        surrogate: non-terminals enter the type layers as their inside vector; `False` is the paper's ablation
            "w/o surrogate" (the embedding of the reduce token instead; the authors then weigh the losses by
            `token_loss_weight=1.0, action_loss_weight=2.0`).
        stop_structure_gradient: the auto-regressive losses do not reach the split scores; `False` is the ablation
            "w/o grad.stop".
    Objective:
        height_loss: "sentence" is the mean over sentences of max(h - threshold, 0) / (n - threshold); "shipped"
            reproduces the authors' broadcast (product of two means); "paper" divides by n.
        height_threshold: tree height below which a tree costs nothing.
        auto_encoding_loss_weight, height_loss_weight, parser_loss_weight, token_loss_weight, action_loss_weight:
            weights of the five parts.
        objective_weight: weight of their sum beside the loss of a classifier; 0: it is not computed.
        document_end_token: documents end in `eos_token_id`, which is trained as a one-token sentence and ends
            generation. The authors train no such token; without it `generate` stops at the length limit only.
    Dropout: embedding_dropout (the inputs of the type and of the token layers), residual_dropout, attention_dropout
        (both), composition_dropout, composition_attention_dropout, parser_dropout (the hidden layer of the split
        scores; the parser's Transformer layers drop nothing), head_dropout (the three heads).
    Search:
        scoring_num_beams: beam of `forward(...).logits` and default beam of `parse`.
        output_marginal_logits: in evaluation mode, return `logits` also with labels, so that Trainer's `predict` and
            `compute_metrics` see them. They cost a search per batch, many times the loss.
    Presets: "gpst-small" (144.05 M parameters) and "gpst-medium" (403.7 M).

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value. (A value of
            the wrong type raises the `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "gpst"
    presets = PRESETS
    sentence_end = "none"  # its end token ends documents, and only with `document_end_token`
    has_positions = True
    searches = True
    tree_codec = "spans"
    attribute_map = {"n_embd": "hidden_size", "n_head": "num_attention_heads"}

    vocab_size: int = 50264
    hidden_size: int = 768
    num_attention_heads: int = 12
    num_type_layers: int = 3
    num_token_layers: int = 9
    intermediate_size: int | None = None
    max_position_embeddings: int = 2047
    activation_function: str = "gelu_pytorch_tanh"
    layer_norm_epsilon: float | int = 1e-5
    initializer_range: float | int = 0.02

    composition_size: int = 256
    composition_num_heads: int = 8
    composition_intermediate_size: int = 1024
    num_composition_layers: int = 4
    num_decomposition_layers: int = 1
    score_size: int = 128
    window_size: int = 2

    parser_size: int = 128
    parser_score_size: int = 512
    num_parser_layers: int = 4
    parser_num_heads: int = 8
    head_expansion: int = 4

    merge_noise: float | int = 1.0
    split_temperature: float | int = 1.0
    hard_inside: bool = False
    accumulate_scores: bool = False
    surrogate: bool = True
    stop_structure_gradient: bool = True

    height_loss: str = "sentence"
    height_threshold: int = 15
    auto_encoding_loss_weight: float | int = 1.0
    height_loss_weight: float | int = 1.0
    parser_loss_weight: float | int = 1.0
    token_loss_weight: float | int = 0.5
    action_loss_weight: float | int = 1.0
    objective_weight: float | int = 0
    document_end_token: bool = False

    embedding_dropout: float | int = 0.1
    residual_dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    composition_dropout: float | int = 0.1
    composition_attention_dropout: float | int = 0.1
    parser_dropout: float | int = 0.1
    head_dropout: float | int = 0.2

    scoring_num_beams: int = 10
    output_marginal_logits: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256
    pad_token_id: int | None = 50258
    reduce_token_id: int = 50257
    cls_token_id: int | None = 50259
    sep_token_id: int | None = 50263

    @property
    def reads_context(self) -> Literal["sentences"]:
        """Complete sentences, each with a tree of its own."""
        return "sentences"

    def __post_init__(self, **kwargs: Any):
        if "gptconfig" in kwargs:
            raise ValueError(
                "This config.json (gptconfig, r2d2config) comes from davidarps/silm, whose model_type is gpst, too. "
                "Convert it: synlm convert gpst --weights FILE --config config.json --tokenizer FOLDER --out FOLDER."
            )
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Type layers and token layers together: the depth that compares with a GPT-2 of the same size."""
        return self.num_type_layers + self.num_token_layers

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        if value != self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_layers={value} is not the sum of num_type_layers {self.num_type_layers} and "
                f"num_token_layers {self.num_token_layers}. Set num_type_layers and num_token_layers instead."
            )

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self._check_sizes()
        self._check_divisible("hidden_size", "num_attention_heads")
        self._check_divisible("composition_size", "composition_num_heads")
        self._check_divisible("parser_size", "parser_num_heads")
        if (self.parser_size // self.parser_num_heads) % 2:
            raise ValueError(
                f"parser_size {self.parser_size} / parser_num_heads {self.parser_num_heads} must be even, because "
                "rotary positions turn pairs of dimensions. Change one of the two."
            )
        self.check_choices(height_loss=HEIGHT_LOSSES)
        # For reduce, the authors may use their pad id; texts may begin with the token of classification.
        for name, others in (("reduce", "bos eos cls sep"), ("sep", "bos eos cls")):
            name, others = f"{name}_token_id", [f"{other}_token_id" for other in others.split()]
            same = sorted(other for other in others if getattr(self, other) == getattr(self, name) is not None)
            if same:
                raise ValueError(
                    f"{name} {getattr(self, name)} has the same id as {same[0]}, but the model needs different ids. "
                    "Take all ids from the tokenizer: GPSTConfig.from_tokenizer(tokenizer, ...)."
                )
        if self.document_end_token and self.eos_token_id is None:
            raise ValueError("document_end_token=True needs an eos_token_id, which is None. Set eos_token_id.")
        if self.document_end_token and self.eos_token_id == self.pad_token_id:
            raise ValueError(
                f"document_end_token=True needs a pad_token_id other than eos_token_id {self.eos_token_id}, because "
                "padding is cut off and the end token is trained. Choose another pad_token_id."
            )
        self.check_choices(activation_function=sorted(ACT2FN))

    def _check_sizes(self) -> None:
        at_least_one = (
            "vocab_size hidden_size num_attention_heads num_type_layers num_token_layers max_position_embeddings "
            "composition_size composition_num_heads composition_intermediate_size num_composition_layers "
            "num_decomposition_layers score_size window_size parser_size parser_score_size num_parser_layers "
            "parser_num_heads head_expansion scoring_num_beams"
        ).split()
        self.check_least(1, *at_least_one)
        weights = (name for name in vars(self) if name.endswith("_loss_weight"))
        self.check_finite("merge_noise", "height_threshold", "initializer_range", "objective_weight", *weights)
        self.check_finite("split_temperature", "layer_norm_epsilon", positive=True)
        if self.intermediate_size is not None:
            self.check_least(1, "intermediate_size")

    def _check_divisible(self, size: str, parts: str) -> None:
        if getattr(self, size) % getattr(self, parts):
            raise ValueError(
                f"{size} {getattr(self, size)} is not a multiple of {parts} {getattr(self, parts)}. "
                "Change one of the two."
            )


__all__ = ["GPSTConfig"]
