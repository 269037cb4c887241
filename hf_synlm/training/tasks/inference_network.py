# SPDX-License-Identifier: Apache-2.0
"""The inference network of URNNG: a distribution over the binary trees of a sentence that has been read to its end.

    h = BiLSTM([start] x_1 .. x_n [end]),   x_t = word embedding + position embedding
    f_ij = [forward_j+1 - forward_i; backward_i-1 - backward_j]      for the span of the words i to j
    s_ij = w . LayerNorm(ReLU(W f_ij + b)) + b'

    p(tree) is proportional to exp(sum of the scores of its spans):
    A_ij = s_ij + logsumexp_k (A_ik + A_kj)     sum over all trees of the span from i to j;   log Z = A_0n
    p_k = softmax_k (A_ik + A_kj)               probability that the span is split at k
    H_ij = sum_k p_k (H_ik + H_kj - log p_k)    entropy of its trees

It helps in training and in estimating the perplexity of words; the model itself does without it.

Source: Kim et al. 2019, section 2.2; the authors' `models.py` (harvardnlp/urnng): `RNNG`, whose spans are read one word
off, as here, and `get_alpha`, `get_entropy` and `sample`, which go span by span. There, [start] and [end] are the words
0 and 2 of the vocabulary; here they have their own vectors.

Shapes: B sentences, N words of the longest, K trees of a sentence, A = 2 N - 1 actions, w word embedding (of a network)
or words of a span minus 1 (of trees), q LSTM state.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hf_synlm.core.binary_trees import BinaryTrees
from hf_synlm.core.module_tools import saved_whole
from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION


class BinaryTreeCRF(BinaryTrees):
    """Binary trees of sentences, with the probability exp(sum of the scores of the spans) / Z."""

    def __init__(self, scores: Tensor, lengths: Tensor) -> None:
        super().__init__(scores, lengths)
        self._splits: list[Tensor] = []
        """By width, [B, N - w, w] A_ik + A_kj of the spans that begin at each word."""

        def add_up(width: int, both: Tensor) -> Tensor:
            self._splits.append(both)
            return scores.diagonal(width, 1, 2) + both.logsumexp(2)

        self.log_partition = self._by_width(scores.diagonal(dim1=1, dim2=2), add_up)

    def entropy(self) -> Tensor:
        """Entropy [B] in nats."""

        def add_up(width: int, both: Tensor) -> Tensor:
            log_probs = self._splits[width - 1].log_softmax(2)
            return (log_probs.exp() * (both - log_probs)).sum(2)

        return self._by_width(torch.zeros_like(self.scores[:, 0]), add_up)

    def log_prob(self, trees: Tensor) -> Tensor:
        """Log-probabilities [B, K] of trees [B, K, N, N]."""
        total = torch.einsum("bkij,bij->bk", trees.to(self.scores.dtype), self.scores)
        return total - self.log_partition[:, None]

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Draw K = `count` trees of every sentence [B, K, N, N]: N sequential steps, O(B K N^2 log N) operations."""

        def draw(width: int) -> Tensor:
            share = self._splits[width - 1].softmax(2).cumsum(2)
            places = torch.rand(*share.shape[:2], count, device=share.device, dtype=share.dtype) * share[..., -1:]
            return torch.searchsorted(share, places, right=True).clamp(max=width - 1).transpose(1, 2)

        return self._follow(draw, count)


class InferenceNetwork(nn.Module):
    """Scores of spans from both ends of an LSTM over the sentence.

    The LSTM has `hidden_size` q in each direction. Dropout falls on the embeddings (width w) and before the scores. All
    parameters are drawn from U(-x, x), x = `initializer_range`.
    """

    def __init__(
        self, embedding_size: int, hidden_size: int, max_length: int, dropout: float, initializer_range: float = 0.1
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.sizes = {
            "embedding_size": embedding_size, "hidden_size": hidden_size, "max_length": max_length, "dropout": dropout
        }  # fmt: skip
        self.boundaries = nn.Parameter(torch.empty(2, embedding_size))
        self.positions = nn.Embedding(max_length + 2, embedding_size)
        self.lstm = saved_whole(nn.LSTM(embedding_size, hidden_size, batch_first=True, bidirectional=True))
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(2 * hidden_size, 2 * hidden_size)
        self.norm = nn.LayerNorm(2 * hidden_size)
        self.output = nn.Linear(2 * hidden_size, 1)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -initializer_range, initializer_range)

    def forward(self, embedded: Tensor, lengths: Tensor, temperature: float = 1.0) -> BinaryTreeCRF:
        """Distribution over the trees of sentences of `embedded` words [B, N, w], padded on the right, `lengths` [B].

        The temperature divides the scores; above 1, trees become more alike. Sentences beyond `max_length` are refused.
        Cost: O(B N q^2 + B N^2 q) multiplications and those of `BinaryTreeCRF`.
        """
        size = embedded.shape[1]
        if size > self.max_length:
            raise ValueError(
                f"A sentence has {size} words, but the inference network reads at most {self.max_length}. Train the "
                "network with a larger --max-sentence-tokens, or leave the sentence out."
            )
        start, end = self.boundaries.expand(len(embedded), 2, -1).split(1, 1)
        column = torch.arange(size + 2, device=embedded.device)
        inputs = torch.cat([start, embedded, end], 1)
        inputs = torch.where((column == lengths[:, None] + 1)[..., None], end, inputs)
        inputs = self.dropout(inputs + self.positions(column))
        packed = pack_padded_sequence(inputs, lengths.cpu() + 2, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=size + 2)
        forward, backward = states.chunk(2, 2)
        # Differences of states, before or after the linear map: O(N) instead of O(N^2) rows of it.
        steps = F.linear(torch.cat([forward[:, 1:], -backward[:, :-1]], 2), self.hidden.weight)
        spans = steps[:, None, 1:] - steps[:, :-1, None] + self.hidden.bias
        features = self.norm(torch.relu(spans))
        scores = self.output(self.dropout(features)).squeeze(3).float()
        return BinaryTreeCRF(scores / temperature, lengths)


def tree_actions(trees: Tensor) -> Tensor:
    """Write trees [..., N, N] (see `BinaryTrees`) as GEN and COMP in post-order [..., A], padded by `PAD_ACTION`."""
    size = trees.shape[-1]
    words = torch.arange(size, device=trees.device)
    ending = trees.sum(-2)  # spans that end with each word, the word itself included
    lengths = (ending > 0).sum(-1, keepdim=True)
    place = (ending.cumsum(-1) - ending).masked_fill(words >= lengths, 2 * size - 1)
    actions = torch.full((*trees.shape[:-2], 2 * size), COMP, device=trees.device).scatter_(-1, place, GEN)[..., :-1]
    return actions.masked_fill(torch.arange(2 * size - 1, device=trees.device) >= 2 * lengths - 1, PAD_ACTION)
