# SPDX-License-Identifier: Apache-2.0
"""The methods of GPST's classifier, without its layers. Shapes: B contexts, T tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import can_return_tuple

from hf_synlm.core.losses import check_shares, share_of
from hf_synlm.core.module_tools import weight_of
from hf_synlm.core.outputs import SyntacticClassifierOutput
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.models.gpst.objective import LOSS_PARTS, count_items
from hf_synlm.models.gpst.tokens import ContextBatch
from hf_synlm.search.parsing import only_token_ids


class GPSTClassifierMixin:
    """A classifier on the state after the CLS token; the model that inherits it has the parts."""

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_ids: Tensor | None = None,
        word_ends: Tensor | None = None,
        output_spans: bool = False,
        loss_shares: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> SyntacticClassifierOutput:
        """Classify texts.

        With `labels`, loss = classification loss + `config.objective_weight` x pretraining objective on the inputs.

        Args:
            input_ids: [B, T] token ids, with SEP and CLS tokens.
            attention_mask: [B, T], 1 = token.
            labels: [B] class ids (or targets of a regression, or [B, num_labels] of a multi-label problem).
            sentence_ids: [B, T] sentence numbers; by default SEP and CLS tokens stand alone and what lies between
                them is one sentence.
            word_ends: [B, T], True at the last piece of every word.
            output_spans: list the trees in `spans`.
            loss_shares: see `GPSTForCausalLM.forward`; the classifier's part is named "classification".
            **kwargs: `output_hidden_states` and `output_attentions` of `GPSTModel.forward`.

        Returns:
            `SyntacticClassifierOutput`. The state is taken after the last CLS token, or after the last token of a row
            that holds none.

        Raises:
            ValueError: see `GPSTModel.forward`.
            TypeError: for other keyword arguments.

        Source: GPST section 4.1 and appendix A.3.
        """
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        check_shares(loss_shares, ("classification", *LOSS_PARTS))
        mask = attended_tokens(self.config, input_ids, attention_mask)
        if sentence_ids is None:
            sentence_ids = self.sentence_ids(input_ids, mask)
        with_objective = labels is not None and self.config.objective_weight > 0
        output = self.model(
            input_ids,
            sentence_ids=sentence_ids,
            word_ends=word_ends,
            output_outside=with_objective,
            output_structure=with_objective,
            output_spans=output_spans,
            return_dict=True,
            **kwargs,
        )
        position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        is_cls = mask & (input_ids == (-1 if self.config.cls_token_id is None else self.config.cls_token_id))
        preferred = torch.where(is_cls.any(1, keepdim=True), is_cls, mask)
        last = torch.where(preferred, position, -1).amax(1)
        logits = self.score(output.last_hidden_state[torch.arange(len(last), device=last.device), last])
        result = SyntacticClassifierOutput(
            logits=logits, spans=output.spans, hidden_states=output.hidden_states, attentions=output.attentions
        )
        if labels is not None:
            classification = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            classification = classification * share_of(loss_shares, "classification")
            result.loss, result.losses = classification, {"classification": classification.detach()}
        if with_objective:
            vocabulary = weight_of(self.lm_head)
            loss, losses, _ = self.heads.objective(self.config, vocabulary, output, input_ids, loss_shares)
            result.loss = result.loss + self.config.objective_weight * loss
            result.losses |= losses
        return result

    def count_loss_items(self: Any, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """Count the items over which each part of the loss is a mean, as `GPSTForCausalLM.count_loss_items` does."""
        if not self.config.objective_weight:
            return {"classification": len(input_ids)}
        sentence_ids = others.get("sentence_ids")
        if sentence_ids is None:
            mask = attended_tokens(self.config, input_ids, others.get("attention_mask"))
            sentence_ids = self.sentence_ids(input_ids, mask)
        text = ContextBatch.read(self.config, input_ids, None, sentence_ids, None)
        return {"classification": len(input_ids), **count_items(text, input_ids)}

    def sentence_ids(self: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Sentence numbers [B, T] from 1: every SEP and CLS token is one sentence; 0 where `mask` is False."""
        special = torch.zeros_like(mask)
        for token_id in (self.config.sep_token_id, self.config.cls_token_id):
            if token_id is not None:
                special |= input_ids == token_id
        begins = special | F.pad(special[:, :-1], (1, 0))
        return (begins.long().cumsum(1) + 1) * mask
