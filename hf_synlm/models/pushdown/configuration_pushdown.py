# SPDX-License-Identifier: Apache-2.0
"""Configuration of Pushdown Layers, a Transformer with a stack tape (Murty et al. 2023)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.core.configuration_base import SyntacticConfig

TAPES = ("depth", "binary")
ATTACHMENT_KEYS = ("mlp", "sum", "none")

# 441 M parameters with the vocabulary of the authors' model of BLLIP (443 M in their file: 2 M have no effect).
PRESETS: dict[str, dict[str, Any]] = {"pushdown-bllip": {"bos_token_id": 50258, "eos_token_id": 50257}}


@strict
class PushdownConfig(SyntacticConfig):
    """Sizes and search of a Transformer with Pushdown Layers; the defaults are those of the authors' BLLIP model.

    Sizes:
        vocab_size: number of token ids (V).
        hidden_size: width (D).
        num_hidden_layers: layers (L).
        num_attention_heads: heads of each layer.
        intermediate_size: width inside the feed-forward layers.
        dropout: on embeddings, attention weights, outputs of the parts of a layer, and inside the attachment head.
    Tape:
        num_depths: larger depths count as num_depths - 1 (N).
        pushdown_layers: numbers of the layers that see the tape; None = all.
        stack_tape: "depth" (how many constituents hold a token) or "binary" (whether any does).
        attachment_key: how the attachment head sees the tape: "mlp" of state and depth, their "sum", or "none".
        attachment_depth_size: width of the depth embedding of "mlp".
    Search:
        scoring_num_beams: derivations kept after each word, of `forward(...).logits` and by default of `parse`.
        output_marginal_logits: in evaluation mode, return `logits` also with attachments, at the cost of a search.
    Special tokens: every sequence begins with bos_token_id. end_token_id is the last word of a sentence in the authors'
        data, which closes the tree. eos_token_id follows it and belongs to no tree. None: there is no such word.

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value.
    """

    model_type = "pushdown"
    presets = PRESETS
    searches = True
    tree_codec = "attachments"
    model_classes = ("Model", "ForCausalLM")

    vocab_size: int = 50259
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 8192
    dropout: float | int = 0.1

    num_depths: int = 50
    pushdown_layers: list[int] | tuple[int, ...] | None = None
    stack_tape: str = "depth"
    attachment_key: str = "mlp"
    attachment_depth_size: int = 128

    scoring_num_beams: int = 10
    output_marginal_logits: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int = 1
    eos_token_id: int | None = 2
    end_token_id: int | None = None

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self.check_least(
            1, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "attachment_depth_size", "scoring_num_beams",
        )  # fmt: skip
        self.check_least(2, "num_depths")
        self.check_choices(stack_tape=TAPES, attachment_key=ATTACHMENT_KEYS)
        if self.hidden_size % self.num_attention_heads or self.hidden_size % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be even and a multiple of {self.num_attention_heads} heads. "
                "Change one of the two."
            )
        for number in self.pushdown_layers or ():
            if not 0 <= number < self.num_hidden_layers:
                raise ValueError(
                    f"pushdown_layers names layer {number}, but the layers are 0 to {self.num_hidden_layers - 1}."
                )
        if self.end_token_id in {self.bos_token_id, self.eos_token_id, self.pad_token_id} - {None}:
            raise ValueError(
                f"The end word (end_token_id {self.end_token_id}) is also the begin, end or padding token. Set "
                "end_token_id to an id of its own, or to None if sentences have no end word."
            )

    @property
    def closing(self) -> dict[int, int]:  # type: ignore[override]
        """Ids after the words of a text, with their attachments: the end word's, and -100 at the end token."""
        ids = {self.end_token_id: 0, self.eos_token_id: -100}
        return {token: attachment for token, attachment in ids.items() if token is not None}
