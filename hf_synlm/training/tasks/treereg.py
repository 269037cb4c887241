# SPDX-License-Identifier: Apache-2.0
"""TreeReg: a loss that makes a layer of any causal language model compose its vectors along gold trees.

    O(a, b) = norm of the part of h_b that is orthogonal to h_a:  how much b adds to a
    score(i, k, j) = O(last_{i-1}, last_{k-1}) + O(last_{k-1}, first_k)
                     + O(last_{k-1}, last_{j-1}) + O(last_{j-1}, first_j)
    loss = mean over spans (i, j) of gold trees of -log softmax_k score(i, k, j), at the gold split k

where h are vectors of one layer, and first and last the tokens of words. Terms outside the sentence are 0. Nothing is
added to the model: its checkpoint loads everywhere as before. `greedy_parse` finds trees by the same score.

    examples = [encode_sentence(tokenizer, sentence.words, sentence.spans) for sentence in treebank]
    trainer = TreeRegTrainer(
        model, args, treereg=TreeRegArguments(), train_dataset=examples, data_collator=TreeRegCollator(0)
    )

Source: Nandi, Manning and Murty, "Sneaking Syntax into Transformer Language Models with Tree Regularization" (NAACL
2025). Their program scores all spans one by one; here the O of a batch come from two matrix products. Vectors of a
language model share a direction, which costs the plain form |h_b|^2 - (h_b . h_a)^2 / |h_a|^2 its digits; h_b - h_a has
the same orthogonal part and keeps them.

Shapes: B sentences, T tokens, W words of the longest sentence, M spans, D width. Spans are half-open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.arguments import option
from hf_synlm.training.tasks.tree_loss import TreeLossTrainer, encode_framed, pad_framed
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span


@dataclass
class TreeRegArguments:
    """Which vectors the loss reads, how often, and how much it counts; the defaults are those of the paper."""

    treereg_layer: int | None = option(
        None,
        "Layer whose output the loss reads, counted from 1 (0: embeddings). Default: three quarters of the depth.",
        minimum=0,
    )
    treereg_part: float = option(0.25, "Share of the dimensions that the loss reads, from the first dimension on.")
    treereg_every: int = option(10, "Use the loss in every N-th optimizer step. N is this number.", minimum=1)
    treereg_weight: float = option(1.0, "Factor of the loss. 0 trains a plain language model.", minimum=0)

    def __post_init__(self):
        """Check the values."""
        if not 0 < self.treereg_part <= 1:
            raise ValueError(f"--treereg-part is {self.treereg_part}. Give a number above 0 and at most 1.")

    def vectors(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """The vectors [B, T, part of the width] that the loss reads, from all hidden states of a model."""
        depth = len(hidden_states) - 1
        layer = round(0.75 * depth) if self.treereg_layer is None else self.treereg_layer
        if layer > depth:
            raise ValueError(f"--treereg-layer is {layer}, but the model has {depth} layers. Give 0 to {depth}.")
        width = int(self.treereg_part * hidden_states[layer].shape[-1])
        return hidden_states[layer][..., :width]


# ---------------------------------------------------------------------------------------------- scores
def orthogonal_norms(base: Tensor, other: Tensor) -> Tensor:
    """Norm [.., N, K] of the part of each vector of `base` [.., N, D] that is orthogonal to each of `other` [.., K, D].

    It is float32 or higher; its gradient is 0 where the norm is 0. Cost: O(N K D).
    """
    wide = torch.promote_types(base.dtype, torch.float32)
    with torch.autocast(base.device.type, enabled=False):
        base, other = base.to(wide), other.to(wide)
        center = other.detach().mean(-2, keepdim=True)
        x, y = base - center, other - center
        along = base @ y.mT - (base * x).sum(-1)[..., None]  # base . (other - base)
        squared = x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :] - 2 * x @ y.mT
        squared = squared - along.square() / base.square().sum(-1).clamp_min(1e-24)[..., None]
        positive = squared > 0
        return torch.where(positive, squared, 1.0).sqrt() * positive


def _charts(vectors: Tensor, word_spans: Tensor) -> tuple[Tensor, Tensor]:
    """O between ends of words, and between neighbours.

    That is [B, W + 1, W + 1]: at (i, k) O(last_{i-1}, last_{k-1}), 0 where i is 0; and [B, W + 1]: at k O(last_{k-1},
    first_k), 0 at both ends.
    """
    index = word_spans[..., None].expand(-1, -1, -1, vectors.shape[-1])
    first = vectors.gather(1, index[:, :, 0])
    last = vectors.gather(1, (index[:, :, 1] - 1).clamp(min=0))
    neighbours = orthogonal_norms(last[:, :-1, None], first[:, 1:, None])[..., 0, 0]
    return F.pad(orthogonal_norms(last, last), (1, 0, 1, 0)), F.pad(neighbours, (1, 1))


def tree_regularization_loss(vectors: Tensor, word_spans: Tensor, splits: Tensor) -> Tensor:
    """The loss of TreeReg in nats: cross entropy of the gold splits of spans of three words or more.

    `vectors` [B, T, D] are those of one layer, or some of its dimensions; `word_spans` [B, W, 2] the tokens of each
    word, (0, 0) = padding; `splits` [B, M, 3] the words (start, first word of the right part, end) of each span, (0, 0,
    0) = padding. The mean is over spans of each sentence, then over sentences, where those without spans count as 0, as
    in the authors' program. Cost: O(W^2 D + M W) for each sentence.
    """
    chart, neighbours = _charts(vectors, word_spans)
    start, split, end = splits.unbind(2)
    row = torch.arange(len(splits), device=splits.device)[:, None]
    # The fourth term is the same for all splits.
    score = chart[row, start] + neighbours[:, None] + chart.mT[row, end]  # [B, M, W + 1]
    place = torch.arange(score.shape[2], device=splits.device)
    possible = (place > start[..., None]) & (place < end[..., None])
    score = score.masked_fill(~possible & (end > 0)[..., None], float("-inf"))
    exists = end > 0
    losses = F.cross_entropy(score.mT, split, reduction="none").masked_fill(~exists, 0.0)
    return (losses.sum(1) / exists.sum(1).clamp(min=1)).mean()


@torch.no_grad()
def greedy_parse(vectors: Tensor, word_spans: Tensor) -> list[tuple[list[Span], float]]:
    """Parse from top to bottom: split each span where the score of TreeReg is highest.

    Arguments are as for `tree_regularization_loss`. Returns for each sentence the word spans of a binary tree in
    post-order, and the sum of the scores of its splits. Cost: O(W^2 D) on the device, then O(W^2) for each sentence.
    """
    charts, neighbours = (values.cpu().double().numpy() for values in _charts(vectors, word_spans))
    parses = []
    for chart, adjacent, length in zip(charts, neighbours, (word_spans[..., 1] > 0).sum(1).tolist(), strict=True):
        adjacent[length] = 0.0
        spans, total, agenda = [], 0.0, [(0, length)] if length > 1 else []
        while agenda:
            i, j = agenda.pop()
            scores = chart[i, i + 1 : j] + adjacent[i + 1 : j] + chart[i + 1 : j, j] + adjacent[j]
            split = i + 1 + int(scores.argmax())
            total += float(scores.max())
            spans.append((i, j))
            agenda += [part for part in ((i, split), (split, j)) if part[1] - part[0] > 1]
        parses.append((spans[::-1], total))
    return parses


# ---------------------------------------------------------------------------------------------- examples
def gold_splits(spans: Sequence[Span], num_words: int) -> list[tuple[int, int, int]]:
    """List the splits of a tree, binarized to the right; spans are half-open and hold the whole sentence.

    A split is (start, first word of the right part, end) of a span of three words or more; they come in post-order.
    """
    if num_words < 3:
        return []
    binary = binarize_spans(spans, num_words)
    # In post-order a right part of two words or more stands before its parent.
    before = [(0, 0), *binary]
    splits = [(i, b if e == j else j - 1, j) for (b, e), (i, j) in zip(before, binary, strict=False)]
    return [(i, k, j) for i, k, j in splits if j - i > 2]


def encode_sentence(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], spans: Sequence[Span]
) -> dict[str, list[Any]]:
    """Encode a sentence and its tree for `TreeRegCollator`: `encode_framed` with the `splits` of the tree."""
    return {**encode_framed(tokenizer, words), "splits": gold_splits(spans, len(words))}


@dataclass
class TreeRegCollator:
    """Sentences of `encode_sentence` -> a right-padded batch for `TreeRegTrainer`; `pad_token_id` may be any id."""

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate sentences: `input_ids`, `attention_mask`, `labels`, `word_spans` and `splits`."""
        splits = [torch.tensor(row["splits"], dtype=torch.long).view(-1, 3) for row in rows]
        return {**pad_framed(rows, self.pad_token_id), "splits": pad_sequence(splits, True)}


# ---------------------------------------------------------------------------------------------- training
class TreeRegTrainer(TreeLossTrainer):
    """`Trainer` of a causal language model that adds the loss of TreeReg to the model's own in training.

    The log has its mean, `treereg_loss`. `data_collator` is a `TreeRegCollator`.
    """

    loss_name, tree_inputs, asks_for = "treereg_loss", ("word_spans", "splits"), "output_hidden_states"

    def __init__(self, *args: Any, treereg: TreeRegArguments, **options: Any):
        super().__init__(*args, weight=treereg.treereg_weight, every=treereg.treereg_every, **options)
        self.treereg = treereg

    def tree_loss(self, outputs: Any, trees: dict[str, Tensor]) -> Tensor:
        """See `tree_regularization_loss`."""
        return tree_regularization_loss(self.treereg.vectors(outputs.hidden_states), **trees)
