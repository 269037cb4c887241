# SPDX-License-Identifier: Apache-2.0
"""A Tree LM that begins with the weights of a decoder; an adapter leaves them out (see `AdapterMixin`)."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_synlm.core.backbone_adapter import AdapterMixin
from hf_synlm.models.tree_lm.backbone import check_backbone
from hf_synlm.models.tree_lm.configuration_tree_lm import TreeLMConfig


class BackboneAdapterMixin(AdapterMixin):
    """Makes a language model of a backbone; in an adapter of it, labels and their biases are trained in full.

    The biases of words, which would learn how frequent words are, stay.
    """

    config: TreeLMConfig
    model: Any
    lm_head: Any
    label_head: Any
    backbone_prefix = "model.backbone."
    frozen = ("lm_head.bias",)

    @classmethod
    def from_backbone(
        cls, name: str, nonterminals: Sequence[str], *, dtype: torch.dtype = torch.float32, **fields: Any
    ) -> Self:
        """Make a Tree LM of a decoder of the Hub, such as GPT-2, Llama or Qwen, whose weights it keeps.

        Given the same ids it computes what the decoder computes. The rows of the labels are drawn around the mean of
        the words', as transformers does for new tokens. What it knows of trees it has to learn: train it on a treebank.

        Args:
            name: folder or Hub name of a causal language model with full attention.
            nonterminals: labels.
            dtype: of the weights.
            **fields: of `TreeLMConfig`.

        Returns:
            The model.

        Raises:
            ValueError: the model is not a decoder, or its attention does not see all positions before.
        """
        source = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        backbone, vocab_size = copy.deepcopy(source.config), source.get_input_embeddings().num_embeddings
        check_backbone(backbone)
        end = backbone.eos_token_id[0] if isinstance(backbone.eos_token_id, list) else backbone.eos_token_id
        special = {"bos_token_id": backbone.bos_token_id, "pad_token_id": backbone.pad_token_id}
        special = {name: end if token is None else token for name, token in special.items()}
        decided = {"tie_word_embeddings": backbone.tie_word_embeddings, "eos_token_id": end, **special}
        sizes = {"vocab_size": vocab_size, "nonterminals": list(nonterminals), "backbone_config": backbone}
        model = cls(cls.config_class(**{**decided, **fields, **sizes})).to(dtype)
        model._take_over(source)
        model.backbone_source = {"name": None if os.path.isdir(name) else str(name), "sha256": model.fingerprint()}
        return model.eval()

    @torch.no_grad()
    def _take_over(self, source: PreTrainedModel) -> None:
        """Copy the weights of a decoder, whose vocabulary gets the labels; check that nothing else is in it."""
        base, place = self.model, torch.arange(4)[None]
        source.resize_token_embeddings(self.config.vocab_size + self.config.num_label_tokens)
        expected = source(place).logits[..., : self.config.vocab_size]
        tables = [
            (source.get_input_embeddings(), (base.embed_tokens, base.embed_labels)),
            (source.get_output_embeddings(), (self.lm_head, self.label_head)),
        ]
        for table, parts in tables:
            for name, value in table.named_parameters():
                for part, rows in zip(parts, value.tensor_split([self.config.vocab_size]), strict=True):
                    getattr(part, name).copy_(rows)
        source.base_model.set_input_embeddings(None)
        base.backbone.load_state_dict(source.base_model.state_dict())
        distance = place[:, :, None] - place[:, None]
        found = self.lm_head(self.eval().model.decode(base.embed(place), distance >= 0, distance.clamp(min=0))[-1])
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(source).__name__} scales or caps its logits, but a Tree LM cannot. Choose another decoder."
            )

    def load_backbone(self, name: str, **access: Any) -> None:
        """Take over the weights of the decoder of this folder or Hub name."""
        self._take_over(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **access).eval())

    def is_of_backbone(self, name: str) -> bool:
        """Whether a parameter came from the backbone: its layers and the tables of the words."""
        return super().is_of_backbone(name) or name in ("model.embed_tokens.weight", "lm_head.weight")

    def saved_in_full(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of an adapter besides LoRA: all outside the backbone; tied weights once."""
        found = super().saved_in_full(weights)
        if self.config.tie_word_embeddings:
            found.pop("label_head.weight", None)
        return found
