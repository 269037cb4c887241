# SPDX-License-Identifier: Apache-2.0
"""Span attention of PaLM: to the spans right before a token, read by a rational RNN (Peng et al., EMNLP 2019).

The slow and obvious version is `Reader` (and `state_of_span`, `tree`, `targets`) in `tests/reference/palm.py`.

Every position t attends to the K spans that end right before it: slot v of K is the span of length K - v that covers
the positions t - K + v .. t - 1, the longest first. A span is encoded by running a recurrence of elementwise gates over
it, once from its left and once from its right end, starting at zero:

    f_s = sigmoid(W_f q_s + b_f),    u_s = (1 - f_s) * (W_u q_s),    c <- f_s * c + u_s

The states of all spans of one length follow from those of the spans that are one shorter, for all positions at once.

Shapes: B sentences, T positions, K spans, N = K + T - 1 tokens that end a span (K before the first position), H hidden
size, D width of both directions together, P attention size.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_synlm.core.losses import widened
from hf_synlm.core.matrix_products import OneDNNLinear
from hf_synlm.models.palm.configuration_palm import PaLMConfig
from hf_synlm.recurrent.layers import locked_dropout
from hf_synlm.trees.spans import Span

# Of states of spans at a time, when a text is parsed: 0.25 GB in float32.
_MAX_NUMBERS = 1 << 26


def span_states(input_BND: Tensor, forget_BND: Tensor, num_spans: int) -> Tensor:
    """States of the rational RNN on all spans [K, B, T, D], the longest spans first.

    With e the end of a span of length L, the first half of the features (S) runs from left to right, the second (R)
    from right to left:

        S_1[e] = R_1[e] = u[e];    S_L[e] = u[e] + f[e] S_L-1[e-1];    R_L[e] = u[e-L+1] + f[e-L+1] R_L-1[e]

    Read from its end, a text turns R into S, so that both run together. The inputs u and the forget gates f are those
    at the K tokens before the first position and at all positions but the last.

    Cost: K steps of one operation on [B, N, D], forward and backward; O(K B N D) memory.
    Source: the recurrence of Algorithm 1. The authors compute it from differences of prefix states and quotients of
    products of gates, which lose digits, and give NaN where a gate is 0; this recurrence does neither.
    """
    return _SpanStates.apply(_both_ways(input_BND), _both_ways(forget_BND), num_spans)


def _both_ways(tokens_BND: Tensor) -> Tensor:
    """[2, B, N, D / 2]: the first half of the features from left to right, the second from right to left."""
    forward, backward = tokens_BND.chunk(2, -1)
    return torch.stack([forward, backward.flip(1)])


def _before_positions(states_K2BNS: Tensor) -> tuple[Tensor, Tensor]:
    """Views [K, B, T, S] of the states right before the positions: from left to right, and from right to left."""
    num_spans, _, num_rows, num_tokens, size = states_K2BNS.shape
    num_positions = num_tokens - num_spans + 1
    forward, backward = states_K2BNS.unbind(1)
    # Read from its end, the first of these spans ends at token L - 1: one token less with every slot.
    strides = (backward.stride(0) - size, num_tokens * size, size, 1)
    offset = backward.storage_offset() + (num_spans - 1) * size
    backward = backward.as_strided((num_spans, num_rows, num_positions, size), strides, offset)
    return forward[:, :, -num_positions:], backward


class _SpanStates(torch.autograd.Function):
    """Inside, states [K, 2, B, N, S] of the spans that end at each token, the longest spans first, in two directions.

    The longer a span, the later it can end: what stands before is never read, and gets no gradient.
    """

    @staticmethod
    def forward(ctx, inputs, forgets, num_spans):
        states = inputs.new_empty(num_spans, *inputs.shape)
        states[-1], states[..., 0, :] = inputs, inputs[..., 0, :]
        for slot in range(num_spans - 2, -1, -1):
            before, ends = states[slot + 1][..., :-1, :], states[slot][..., 1:, :]
            torch.addcmul(inputs[..., 1:, :], forgets[..., 1:, :], before, out=ends)
        ctx.save_for_backward(forgets, states)
        forward, backward = _before_positions(states)
        return torch.cat([forward, backward.flip(2)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_KBTD):
        forgets, states = ctx.saved_tensors
        grads = torch.zeros_like(states)
        forward, backward = grad_KBTD.chunk(2, -1)
        for place, gradient in zip(_before_positions(grads), (forward, backward.flip(2)), strict=True):
            place.copy_(gradient)
        for slot in range(len(states) - 1):
            grads[slot + 1][..., :-1, :].addcmul_(grads[slot][..., 1:, :], forgets[..., 1:, :])
        grad_forgets = torch.zeros_like(forgets)
        grad_forgets[..., 1:, :] = (grads[:-1][..., 1:, :] * states[1:][..., :-1, :]).sum(0)
        return grads.sum(0), grad_forgets, None


class SpanAttention(nn.Module):
    """Scores of the spans that end right before each position, and their vectors averaged by these scores.

    With q the hidden states and c a span's state:

        n = tanh(sigmoid(W_g q_t + b_g) * c),  or c without `output_gate`
        s = w . tanh(W_n n + W_q q_t + b);     context_t = sum_v softmax(s)_v n_v

    Dropout takes the same units of the rational RNN's state from all spans.

    Source: equation 3 of the paper, with the gate of the authors' code. Their recurrence from right to left (`rrnn.py`)
        mixes the rows of a batch and lets a token see later ones; this one does not.
    """

    def __init__(self, config: PaLMConfig) -> None:
        super().__init__()
        hidden, size, attention = config.layer_size, config.rrnn_size, config.attention_size
        width = 2 * size
        self.dropout = config.hidden_dropout
        self.input_activation = config.input_activation
        self.input = _linear(hidden, width, (hidden, size), gain=5 / 3, bias=False)
        self.forget_gate = _linear(hidden, width, (hidden, size), gain=5 / 3)
        self.output_gate = _linear(hidden, width, (hidden, size)) if config.output_gate else None
        self.learned = config.span_scores == "learned"
        if self.learned:
            self.query = _linear(hidden, attention, (hidden + width, attention))
            self.key = _linear(width, attention, (hidden + width, attention), bias=False)
            self.score = _linear(attention, 1, (attention, 1), bias=False)

    def forward(self, query_BTH: Tensor, history_BKH: Tensor) -> tuple[Tensor, Tensor]:
        """Context [B, T, D] of hidden states after every token, and scores [B, T, K], longest span first.

        `history_BKH` are the hidden states of the K tokens before the first position; zeros before the text.
        """
        vectors_KBTD, scores_KBT = self._score(query_BTH, history_BKH)
        weights_KBT = scores_KBT.softmax(0).to(vectors_KBTD.dtype)
        return (vectors_KBTD * weights_KBT[..., None]).sum(0), scores_KBT.permute(1, 2, 0)

    def scores(self, query_BTH: Tensor, history_BKH: Tensor) -> Tensor:
        """Scores [B, T, K] only, for `parse`, in bounded memory; the score of a span does not depend on K."""
        num_spans = history_BKH.shape[1]
        tokens_BNH = torch.cat([history_BKH.to(query_BTH), query_BTH], 1)
        # All spans of a long text at once would not fit into memory.
        block = max(1, _MAX_NUMBERS // (len(query_BTH) * num_spans * self.input.out_features))
        parts = [
            self._score(query_BTH[:, start : start + block], tokens_BNH[:, start : start + num_spans])[1]
            for start in range(0, query_BTH.shape[1], block)
        ]
        return torch.cat(parts, 2).permute(1, 2, 0)

    def _score(self, query_BTH: Tensor, history_BKH: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [K, B, T, D] of all spans and their scores [K, B, T], the longest first."""
        num_spans = history_BKH.shape[1]
        vectors_KBTD = span_states(*self._gates(query_BTH, history_BKH), num_spans)
        if self.output_gate is not None:
            vectors_KBTD = (vectors_KBTD * self.output_gate(query_BTH).sigmoid()).tanh_()
        if self.learned:
            return vectors_KBTD, self.score((self.key(vectors_KBTD) + self.query(query_BTH)).tanh_()).squeeze(-1)
        fixed = torch.arange(num_spans, 0, -1, dtype=query_BTH.dtype, device=query_BTH.device)
        return vectors_KBTD, fixed[:, None, None].expand(-1, *query_BTH.shape[:2])

    def _gates(self, query_BTH: Tensor, history_BKH: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and forget gates [B, N, D] of the tokens that end a span."""
        tokens_BNH = torch.cat([history_BKH.to(query_BTH), query_BTH[:, :-1]], 1)
        logit, value = self.forget_gate(tokens_BNH), self.input(tokens_BNH)
        if self.input_activation == "tanh":
            value = value.tanh()
        # A state is linear in the inputs, so that a mask on them is one on the states.
        value = locked_dropout(value * (-logit).sigmoid(), self.dropout, self.training)
        return value, logit.sigmoid()


def _linear(
    in_features: int, out_features: int, fans: tuple[int, int], gain: float = 1.0, bias: bool = True
) -> OneDNNLinear:
    """A layer with the initial bound of the authors' larger matrix: of both directions, or of concatenated inputs."""
    layer = OneDNNLinear(in_features, out_features, bias=bias)
    layer.initial_bound = gain * (6 / sum(fans)) ** 0.5
    return layer


def gold_attention(spans: Sequence[Sequence[Span]], mask_BT: Tensor | None, scores_BTK: Tensor) -> Tensor:
    """Target attention [B, T, K] of gold spans (PaLM-S): each token shares 1 among the spans that end right before it.

    `spans` are per row `(i, j)` in columns; i is negative where the span begins in an earlier segment. Zeros where no
    span of 2 to K tokens ends.

    Source: footnote 9 of the paper. The program of the authors gives long spans more weight and puts the targets at
    other tokens.
    """
    num_rows, width, num_spans = scores_BTK.shape
    masks = [[True] * width] * num_rows if mask_BT is None else mask_BT.tolist()
    place: list[tuple[int, int, int]] = []
    for row, (pairs, mask) in enumerate(zip(spans, masks, strict=True)):
        tokens = [column for column, is_token in enumerate(mask) if is_token]
        before = [0, *accumulate(mask)]  # number of tokens before each column
        for i, j in pairs:
            end = before[j]
            length = end - (i if i < 0 else before[i])
            if 1 < length <= num_spans and end < len(tokens):
                place.append((row, tokens[end], num_spans - length))
    target_BTK = torch.zeros_like(scores_BTK)
    if place:
        index = torch.tensor(place, device=target_BTK.device)
        target_BTK[index[:, 0], index[:, 1], index[:, 2]] = 1
    return target_BTK / target_BTK.sum(-1, keepdim=True).clamp_min(1)


def attention_loss(scores_BTK: Tensor, target_BTK: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Cross entropy of the attention with its targets, in nats; the mean over all tokens, with or without a target.

    Source: equation 5 of the paper.
    """
    loss_BT = -(target_BTK * widened(scores_BTK).log_softmax(-1)).sum(-1)
    return loss_BT.mean() if mask_BT is None else loss_BT.sum() / mask_BT.sum().clamp_min(1)


def split_by_scores(scores_TK: Tensor, bounds: Sequence[int]) -> list[Span]:
    """Binary tree, top down: a constituent is split where its right part has the highest score; spans in post-order.

    `scores_TK` are those of the spans that end right before each column, the longest (K tokens) first; `bounds` are the
    columns at which the words begin, and the column after the last one.

    Source: equation 4 of the paper; as in the authors' code both parts lie inside the constituent.
    """
    rows, num_spans = scores_TK.tolist(), scores_TK.shape[1]
    spans, todo = [], [(0, len(bounds) - 1)]
    while todo:
        i, j = todo.pop()
        if j - i > 1:
            spans.append((i, j))
            row, end = rows[bounds[j]], bounds[j]
            split = max(range(i + 1, j), key=lambda k: row[num_spans - end + bounds[k]])
            todo += [(i, split), (split, j)]
    return spans[::-1]
