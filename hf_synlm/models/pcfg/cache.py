# SPDX-License-Identifier: Apache-2.0
"""What a PCFG has read of sentences, as `past_key_values`: `logits` word by word.

Shapes: B sentences, T columns, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.cache import StateCache
from hf_synlm.core.token_batch import attended_tokens, check_tokens, padding_mask
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig
from hf_synlm.models.pcfg.inside import Grammar
from hf_synlm.models.pcfg.prefix import PrefixState, prefix_log_probs
from hf_synlm.models.pcfg.sentences import refuse_silent_words


class PCFGCache(StateCache):
    """State after a prefix, under one grammar or under each of a mixture; it carries no gradient."""

    def __init__(self, grammars: list[Grammar], batch_size: int) -> None:
        super().__init__()
        self.grammars = grammars
        self._begin(batch_size)

    def _begin(self, batch_size: int) -> None:
        self.state = [PrefixState.before(grammar, batch_size) for grammar in self.grammars]
        device = self.state[0].prefix.device
        self.begun, self.ended = torch.zeros(2, batch_size, dtype=torch.bool, device=device)

    @property
    def batch_size(self) -> int:
        """Number of sentences."""
        return len(self.begun)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sentences `beam_idx` [B'], in that order."""
        rows = beam_idx.to(self.begun.device)
        self.state = [state.select(rows) for state in self.state]
        self.begun, self.ended = self.begun[rows], self.ended[rows]

    @torch.no_grad()
    def read(self, config: PCFGConfig, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Read columns [B, T]; log p(next token | everything before) [B, T, V] after each.

        `attention_mask` covers them, or all columns read so far. Masked columns, and all behind the end token, are
        skipped.
        """
        if self.state is None:  # after `reset`
            self._begin(len(input_ids))
        mask = self._mask(config, input_ids, attention_mask)
        begun = self.begun[:, None] | (mask.cumsum(1) > 1)
        words = mask & (begun | (input_ids != (-1 if config.bos_token_id is None else config.bos_token_id)))
        ends = words & (input_ids == (-1 if config.eos_token_id is None else config.eos_token_id))
        ended = self.ended[:, None] | (ends.cumsum(1) > 0)
        words = words & ~ended
        refuse_silent_words(config, input_ids, words)
        logits, self.begun = [], self.begun | mask.any(1)
        for ids, present, self.ended in zip(input_ids.unbind(1), words.unbind(1), ended.unbind(1), strict=True):
            if present.any():
                pairs = zip(self.state, self.grammars, strict=True)
                self.state = [state.read(grammar, ids, present) for state, grammar in pairs]
            logits.append(self._next(config))
        self.num_columns += input_ids.shape[1]
        return torch.stack(logits, 1)

    def _mask(self, config: PCFGConfig, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if len(input_ids) != self.batch_size:
            raise ValueError(
                f"past_key_values holds {self.batch_size} rows, but input_ids has {len(input_ids)}. Pass the cache "
                "that was returned for the same rows, or leave past_key_values out."
            )
        attention_mask = padding_mask(attention_mask)
        if attention_mask is None:
            if self.num_columns:
                check_tokens(config, input_ids, None)
                return torch.ones_like(input_ids, dtype=torch.bool)
            # Padding at both ends; the begin token is left to `read`.
            words = attended_tokens(config, input_ids, None)
            return words | F.pad(words[:, 1:], (0, 1))
        if attention_mask.shape[1] == self.num_columns + input_ids.shape[1]:
            attention_mask = attention_mask[:, self.num_columns :]
        check_tokens(config, input_ids, attention_mask)
        return attention_mask.bool()

    def _next(self, config: PCFGConfig) -> Tensor:
        pairs = list(zip(self.state, self.grammars, strict=True))
        expected = [(grammar, state.preterminals, state.state_scale[:, -1]) for state, grammar in pairs]
        whole, prefix = (torch.stack([getattr(state, name) for state in self.state]) for name in ("whole", "prefix"))
        return next_token_log_probs(config, expected, whole, prefix, self.ended)


def next_token_log_probs(
    config: PCFGConfig, expected: list[tuple[Grammar, Tensor, Tensor]], whole: Tensor, prefix: Tensor, ended: Tensor
) -> Tensor:
    """Log p(next token) [..., V] of a mixture of K grammars.

    `expected` are by grammar itself, weights [..., X] of the preterminals and their log scale [...]; `whole` [K, ...]
    log p(words so far are the sentence), `prefix` [K, ...] log p(words so far); `ended` [...] where the end token was
    read: it follows for ever.
    """
    read = prefix.logsumexp(0)
    parts = [prefix_log_probs(grammar, weights, scale - read) for grammar, weights, scale in expected]
    # A copy, for the gradient of logsumexp reads its result.
    log_probs = parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0).clone()
    if config.eos_token_id is not None:
        log_probs[..., config.eos_token_id] = whole.logsumexp(0) - read
        if torch.compiler.is_compiling() or ended.any():
            log_probs[ended] = log_probs.new_full(log_probs.shape[-1:], -torch.inf).index_fill(
                0, torch.tensor(config.eos_token_id, device=log_probs.device), 0.0
            )
    return log_probs
