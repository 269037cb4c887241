# SPDX-License-Identifier: Apache-2.0
"""N-gram language models: the baseline that a model of words has to beat, on the same text and tokens.

    p(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + g(h) p(w | h'),   h' = h without its first token

with interpolated modified Kneser-Ney smoothing: in the highest order, and where h begins a sentence, c are counts;
below, c(h w) is the number of different tokens before h w. D is one of three discounts, of counts 1, 2 and more, g(h)
what they take away, and p without history is mixed with the same probability for every token. The model is one of
transformers with exact `logits`: `synlm surprisal`, `synlm evaluate` and every tool that reads logits take its folder.

Source: Chen and Goodman (1999), "An empirical study of smoothing techniques for language modeling", section 4.1.1; a
sentence has one begin token, as in KenLM (Heafield et al. 2013).

Shapes: B texts, T tokens, V vocabulary, R = B T, N order, M n-grams of an order, C contexts = n-grams of the one below.
"""

from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


@strict
class NGramConfig(PreTrainedConfig):
    """Sizes and special tokens of an n-gram model.

    Fields:
        vocab_size: number of token ids (V).
        num_ngrams: how many different n-grams there are of the orders 1 to N.
        special_token_ids: tokens that are never predicted; the end token is predicted.
    """

    model_type = "ngram_lm"

    vocab_size: int = 1
    num_ngrams: list[int] | tuple[int, ...] = ()
    special_token_ids: list[int] | tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None


class Order(NamedTuple):
    """What one order adds: of each n-gram its last token and probability, of each context its n-grams and its rest."""

    token_M: Tensor
    prob_M: Tensor
    start_C: Tensor  # and the end of the last context
    rest_C: Tensor


class NGramForCausalLM(PreTrainedModel):
    """N-gram model with interpolated modified Kneser-Ney smoothing; `from_tokens` counts, `forward` gives `logits`.

    `keys` of an order are sorted: number of the context V + last token, where the context is an n-gram of the order
    below. `counts` are those of the equation at the top of the file, `discounts` [N, 4] of the counts 0, 1, 2 and more.
    """

    config_class = NGramConfig

    def __init__(self, config: NGramConfig):
        super().__init__(config)
        for name in ("keys", "counts"):
            tables = (torch.zeros(size, dtype=torch.long) for size in config.num_ngrams)
            setattr(self, name, nn.ParameterList(nn.Parameter(table, requires_grad=False) for table in tables))
        discounts = torch.zeros(len(config.num_ngrams), 4, dtype=torch.float64)
        self.discounts = nn.Parameter(discounts, requires_grad=False)
        self.post_init()

    @classmethod
    @torch.no_grad()
    def from_tokens(cls, ids: Tensor, places: Tensor, order: int, **config: Any) -> Self:
        """Count the n-grams of sentences.

        Args:
            ids: [T] tokens of all sentences, each with its begin and its end token.
            places: [T] index of each token in its sentence, 0 at the begin token.
            order: N, at least 2.
            **config: fields of `NGramConfig`, but for `num_ngrams`.

        Returns:
            The model.
        """
        keys: list[Tensor] = []
        counts: list[Tensor] = []
        begins = torch.empty(0)
        ngram = torch.zeros_like(ids)  # number of the n-gram of the order below that ends at each token
        for length in range(1, order + 1):
            (ends,) = (places >= length - 1).nonzero(as_tuple=True)
            key = ngram.roll(1)[ends] * config["vocab_size"] + ids[ends]
            found, which, count = torch.unique(key, return_inverse=True, return_counts=True)
            if length > 1:  # different tokens before the n-grams of the order below, which end where these end
                one = torch.empty_like(found).scatter_(0, which, ends)
                different = torch.bincount(ngram[one], minlength=len(counts[-1]))
                counts[-1] = torch.where(begins, counts[-1], different)
            ngram = torch.zeros_like(ids).index_copy_(0, ends, which)
            begins = torch.zeros_like(found, dtype=torch.bool)
            if length > 1:  # nothing stands before the begin token, and it is never predicted
                begins[which[places[ends] == length - 1]] = True
            keys, counts = [*keys, found], [*counts, count]
        model = cls(NGramConfig(num_ngrams=[len(table) for table in keys], **config))
        for number, tables in enumerate(zip(keys, counts, map(discounts, counts), strict=True)):
            for own, table in zip((model.keys, model.counts, model.discounts), tables, strict=True):
                own[number].copy_(table)
        return model

    @cached_property
    def orders(self) -> list[Order]:
        """The probabilities of the equation, in float64."""
        found, num_contexts = [], 1
        for keys, counts, cost in zip(self.keys, self.counts, self.discounts.double(), strict=True):
            first = torch.arange(num_contexts + 1, device=keys.device) * self.config.vocab_size
            start = torch.searchsorted(keys, first)
            kind = counts.clamp(max=3)
            total = _sums(counts, start)
            taken = sum(cost[k] * _sums((kind == k).long(), start) for k in (1, 2, 3))
            rest = torch.where(total > 0, taken / total, 1.0)  # nothing follows the end token
            divisor = total.clamp(min=1).repeat_interleave(start.diff())
            found.append(Order(keys % self.config.vocab_size, (counts - cost[kind]) / divisor, start, rest))
            num_contexts = len(keys)
        return found

    @cached_property
    def base(self) -> Tensor:
        """[V] p of no history."""
        possible = torch.ones(self.config.vocab_size, dtype=torch.float64, device=self.device)
        possible[self.config.special_token_ids] = 0
        first = self.orders[0]
        return (possible * (first.rest_C / possible.sum())).index_add(0, first.token_M, first.prob_M)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> CausalLMOutput:
        """Next-token log-probabilities.

        Args:
            input_ids: [B, T], each row after its begin token; padding on the right changes nothing.
            attention_mask: not needed.
            **others: what tools pass on, such as `use_cache`; without effect.

        Returns:
            `logits` [B, T, V] = log p(next token | the last N - 1 tokens), float64, normalized.

        Cost: O(N B T V).
        """
        size, context_BT = self.config.vocab_size, torch.zeros_like(input_ids)
        probs_RV = self.base.repeat(input_ids.numel(), 1)
        for keys, order in zip(self.keys, self.orders[1:], strict=False):
            # The n-gram that ends at each token, -1 = not in the training text: the context of the next order.
            wanted = context_BT * size + input_ids
            place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
            ngram_BT = torch.where((context_BT >= 0) & (keys[place] == wanted), place, -1)
            (row,) = (ngram_BT.flatten() >= 0).nonzero(as_tuple=True)
            context = ngram_BT.flatten()[row]
            probs_RV *= torch.ones_like(probs_RV[:, :1]).index_copy_(0, row, order.rest_C[context, None])
            length = order.start_C[context + 1] - order.start_C[context]
            which = torch.arange(int(length.sum()), device=row.device)
            which += (order.start_C[context] + length - length.cumsum(0)).repeat_interleave(length)
            cells = row.repeat_interleave(length) * size + order.token_M[which]
            probs_RV.view(-1).index_add_(0, cells, order.prob_M[which])
            context_BT = nn.functional.pad(ngram_BT[:, :-1], (1, 0), value=-1)
        return CausalLMOutput(logits=probs_RV.log().view(*input_ids.shape, size))


def discounts(counts: Tensor) -> Tensor:
    """[4] discounts of the counts 0, 1, 2 and more: D_k = k - (k + 1) t_1 t_(k+1) / (t_k (t_1 + 2 t_2)).

    t_k is how many n-grams have count k. Where one of t_1 to t_4 is 0 or a discount is negative, as in a few sentences,
    they are 0.5, 1 and 1.5, as KenLM's `--discount_fallback`.
    """
    t = torch.bincount(counts, minlength=5)[:5].double()
    k = torch.arange(1, 4)
    found = k - (k + 1) * t[1] * t[2:5] / (t[1:4] * (t[1] + 2 * t[2]))
    if not (t[1:] > 0).all() or (found < 0).any():
        found = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    return nn.functional.pad(found, (1, 0))


def _sums(values_M: Tensor, start_C: Tensor) -> Tensor:
    """Sum of the values of each context."""
    return nn.functional.pad(values_M.cumsum(0), (1, 0))[start_C].diff()


AutoConfig.register(NGramConfig.model_type, NGramConfig)
AutoModelForCausalLM.register(NGramConfig, NGramForCausalLM)
