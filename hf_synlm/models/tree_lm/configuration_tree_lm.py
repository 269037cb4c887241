# SPDX-License-Identifier: Apache-2.0
"""Configuration of Tree LM, a Transformer over linearized trees, and of Transformer Grammars (Sartran et al. 2022).

One flat dataclass: sizes, the structure that attention sees, the labels of the nonterminals, and the search.
"""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from hf_synlm.search.labeled.configuration import LabeledTreeConfig

STRUCTURES = ("causal", "stack_compose")
LINEARIZATIONS = ("top_down", "binary")

# The sizes of the paper: 252 M parameters.
PRESETS: dict[str, dict[str, Any]] = {
    "transformer-grammar": {"structure_attention": "stack_compose"},
    "txl-trees": {},
}


@strict
class TreeLMConfig(LabeledTreeConfig):
    """Sizes, structure and search of a Tree LM; the defaults are the published size of 252 M parameters.

    Sizes:
        vocab_size: number of word ids (V). The labels of openings and closings have a table of their own.
        hidden_size: width (D).
        num_hidden_layers: layers (L).
        num_attention_heads: heads of each layer.
        intermediate_size: width inside the feed-forward layers.
        dropout: on embeddings, positions, attention weights, attention output, inside and after the feed-forward
            layers, and on the output of the last layer.
        backbone_config: configuration of a decoder of transformers, whose layers, sizes and dropout replace our own
            (see `TreeLMForCausalLM.from_backbone`); None = our own. "causal" only.
        adapter_of: in a folder with an adapter, name and fingerprint of the backbone whose weights it leaves out.
    Structure:
        linearization: "top_down" (opening labels, words, closing labels) or "binary" (a label takes the two last
            elements: GEN and COMP of GPST, with labels), which needs "causal" and an end token.
        structure_attention: "causal" (a position sees all before it, and its distance to them) or "stack_compose"
            (Transformer Grammars: it sees the stack, and differences of depth; a closing label composes).
        min_relative_position, max_relative_position: differences of depth are clipped to these ("stack_compose").
        max_consecutive_nonterminals: nonterminals opened in a row without a word between.
    Special tokens: every sequence begins with bos_token_id; pad_token_id is never a word. A sentence ends when its tree
        is closed, which eos_token_id stands for.
    Presets: "transformer-grammar" and "txl-trees", its control without structure in attention.

    Raises:
        ValueError: when a field is out of range or two fields do not fit; the message names the value.
    """

    model_type = "tree_lm"
    presets = PRESETS
    sub_configs = {"backbone_config": AutoConfig}

    vocab_size: int = 32768
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    dropout: float | int = 0.1
    backbone_config: dict | PreTrainedConfig | None = None
    adapter_of: dict | None = None

    linearization: str = "top_down"
    structure_attention: str = "causal"
    min_relative_position: int = -1
    max_relative_position: int = 62
    loss_normalization: str = "action"
    max_consecutive_nonterminals: int = 8
    bos_token_id: int = 0

    in_order = False
    measures_attention = True

    def __post_init__(self, **kwargs: Any):
        if isinstance(self.backbone_config, dict):
            fields = dict(self.backbone_config)
            kind = fields.pop("model_type", None)
            if kind not in CONFIG_MAPPING:
                raise ValueError(f"backbone_config has the model_type {kind!r}, which transformers does not know.")
            self.backbone_config = CONFIG_MAPPING[kind](**fields)
        if self.backbone_config is not None:
            self.backbone_config._name_or_path = ""  # the folder of a user's machine
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
                if not hasattr(self.backbone_config, name):
                    raise ValueError(
                        f"The backbone {self.backbone_config.model_type!r} has no {name}. Choose a decoder."
                    )
                setattr(self, name, getattr(self.backbone_config, name))
            positions = getattr(self.backbone_config, "max_position_embeddings", None)
            if positions and positions < 4 * self.max_position_embeddings:  # a tree has up to four for each word
                kwargs.setdefault("max_position_embeddings", positions // 4)
        super().__post_init__(**kwargs)

    @property
    def transition_system(self) -> str:
        """`linearization`, by the name that the search knows (see `TransitionSystem`)."""
        return self.linearization

    @property
    def num_label_tokens(self) -> int:
        """Number of tokens that are labels: openings and closings, or (bottom-up) closings alone."""
        return len(self.nonterminals) * (1 if self.is_bottom_up else 2)

    @property
    def consecutive_limit(self) -> int:
        """Maximum number of labels other than REDUCE in a row, by the name that the search knows."""
        return self.max_consecutive_nonterminals

    @property
    def searches_best_first(self) -> bool:
        """Whether the search executes the best states of a word first."""
        return super().searches_best_first or (self.search_order is None and self.backbone_config is not None)

    @property
    def is_bottom_up(self) -> bool:
        """Whether labels stand after their words only."""
        return self.linearization != "top_down"

    @property
    def reads_context(self) -> Literal["plain text"] | None:
        """Context is plain text on a backbone, which has learned to read it; trees never show it."""
        return None if self.backbone_config is None else "plain text"

    def validate_architecture(self) -> None:
        """Check that the fields are in range and fit together (called at construction and before saving)."""
        self.check_least(
            1, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "max_consecutive_nonterminals",
        )  # fmt: skip
        self.check_choices(structure_attention=STRUCTURES, linearization=LINEARIZATIONS)
        self.check_search()
        if self.backbone_config is not None and self.structure_attention != "causal":
            raise ValueError(
                f"structure_attention is {self.structure_attention!r}, but a backbone attends to all earlier "
                "positions. Choose 'causal', or leave backbone_config out."
            )
        if self.backbone_config is None and self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of 2 x {self.num_attention_heads} heads. Change "
                "one of the two."
            )
        if not self.min_relative_position <= 0 <= self.max_relative_position:
            raise ValueError(
                f"Relative positions from {self.min_relative_position} to {self.max_relative_position} leave out 0. "
                "Set min_relative_position <= 0 <= max_relative_position."
            )
        if self.is_bottom_up and (self.structure_attention != "causal" or self.eos_token_id is None):
            raise ValueError(
                f"linearization={self.linearization!r} needs structure_attention='causal' and an eos_token_id, but "
                f"structure_attention is {self.structure_attention!r} and eos_token_id is {self.eos_token_id}."
            )
