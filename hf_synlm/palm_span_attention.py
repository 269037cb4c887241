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

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from .configuration_palm import PaLMConfig
from .matrix_products import OneDNNLinear
from .recurrent_layers import locked_dropout
from .trees import Span


def span_states(input_BND: Tensor, forget_BND: Tensor, num_spans: int) -> Iterator[Tensor]:
    """States of the rational RNN on all spans, length by length.

    With e the end of a span of length L, the first half of the features (S) runs from left to right, the second (R)
    from right to left:

        S_1[e] = R_1[e] = u[e];    S_L[e] = u[e] + f[e] S_L-1[e-1];    R_L[e] = u[e-L+1] + f[e-L+1] R_L-1[e]

    Args:
        input_BND: inputs u at the K tokens before the first position and at all positions but the last.
        forget_BND: forget gates f there.
        num_spans: number of lengths (K).

    Yields:
        [B, T, D] for each length 1 .. K: states of the spans of that length that end right before the positions.

    Cost: K steps, each a few operations on [B, T, D].
    Source: the recurrence of Algorithm 1. The authors compute it from differences of prefix states and quotients of
        products of gates, which lose digits, and give NaN where a gate is 0; this recurrence does neither.
    """
    num_positions = input_BND.shape[1] - num_spans + 1
    input_forward, input_backward = input_BND.chunk(2, -1)
    forget_forward, forget_backward = forget_BND.chunk(2, -1)
    forward, backward = input_forward, input_backward[:, num_spans - 1 :]
    yield torch.cat([forward[:, -num_positions:], backward], -1)
    for length in range(2, num_spans + 1):
        ends = slice(length - 1, None)
        forward = torch.addcmul(input_forward[:, ends], forget_forward[:, ends], forward[:, :-1])
        starts = slice(num_spans - length, num_spans - length + num_positions)
        backward = torch.addcmul(input_backward[:, starts], forget_backward[:, starts], backward)
        yield torch.cat([forward[:, -num_positions:], backward], -1)


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
        """Attend from every position.

        Args:
            query_BTH: hidden states of the positions, each after its token.
            history_BKH: hidden states of the K tokens before the first position; zeros before the text.

        Returns:
            Context [B, T, D], and scores [B, T, K], longest span first.
        """
        vectors, scores_BTK = self._score(query_BTH, history_BKH, keep_vectors=True)
        weights = scores_BTK.softmax(-1).to(vectors[0].dtype).unbind(-1)
        context = weights[-1][..., None] * vectors[0]
        for vector, weight in zip(vectors[1:], weights[-2::-1], strict=True):
            context = torch.addcmul(context, weight[..., None], vector)
        return context, scores_BTK

    def scores(self, query_BTH: Tensor, history_BKH: Tensor) -> Tensor:
        """Scores [B, T, K] only, for `parse`; the score of a span does not depend on K."""
        return self._score(query_BTH, history_BKH, keep_vectors=False)[1]

    def _score(self, query_BTH: Tensor, history_BKH: Tensor, keep_vectors: bool) -> tuple[list[Tensor], Tensor]:
        """Vectors of all spans, the shortest first, and their scores, the longest first."""
        num_spans = history_BKH.shape[1]
        gate_BTD = None if self.output_gate is None else self.output_gate(query_BTH).sigmoid()
        query_BTP = self.query(query_BTH) if self.learned else None
        vectors, scores = [], []
        for state_BTD in span_states(*self._gates(query_BTH, history_BKH), num_spans):
            vector_BTD = state_BTD if gate_BTD is None else (state_BTD * gate_BTD).tanh_()
            if self.learned:
                scores.append(self.score((self.key(vector_BTD) + query_BTP).tanh_()))
            if keep_vectors:
                vectors.append(vector_BTD)
        if self.learned:
            return vectors, torch.cat(scores[::-1], -1)
        fixed = torch.arange(num_spans, 0, -1, dtype=query_BTH.dtype, device=query_BTH.device)
        return vectors, fixed.expand(*query_BTH.shape[:2], -1)

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
    """Target attention of gold spans (PaLM-S): each token shares 1 among the spans that end right before it.

    Args:
        spans: per row spans `(i, j)` in columns; i is negative where the span begins in an earlier segment.
        mask_BT: True = token; None = every column.
        scores_BTK: gives shape, type and device.

    Returns:
        [B, T, K], zeros where no span of 2 to K tokens ends.

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
    """Cross entropy of the attention with its targets; the mean over all tokens, with or without a target.

    Args:
        scores_BTK: scores of the spans.
        target_BTK: see `gold_attention`.
        mask_BT: True = token; None = every column.

    Returns:
        Scalar, in nats.

    Source: equation 5 of the paper.
    """
    wide = torch.promote_types(scores_BTK.dtype, torch.float32)
    loss_BT = -(target_BTK * scores_BTK.to(wide).log_softmax(-1)).sum(-1)
    return loss_BT.mean() if mask_BT is None else loss_BT.sum() / mask_BT.sum().clamp_min(1)


def split_by_scores(scores_TK: Tensor, bounds: Sequence[int]) -> list[Span]:
    """Binary tree, top down: a constituent is split where its right part has the highest score.

    Args:
        scores_TK: scores of the spans that end right before each column, the longest (K tokens) first.
        bounds: columns at which the words begin, and the column after the last one.

    Returns:
        Spans over the words, those of one word left out, in post-order.

    Cost: n - 1 splits of up to n candidates each.
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
