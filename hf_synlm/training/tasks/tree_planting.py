# SPDX-License-Identifier: Apache-2.0
"""Tree-planting: a loss that makes a head of attention of any causal language model follow gold trees.

    d(i, j) = edges between the words i and j in the tree
    target(i, j) = softmax over j < i of -d(i, j)
    a(i, j) = attention to the tokens of word j, where the tokens of word i are predicted; normalized over j < i
    loss = mean over words i of KL(target(i, .) || a(i, .))

The begin token is the first word and the end token the last one; both hang from a node above the tree, beside it. The
trees are dependency trees, or constituents: n-ary or binary, with unary chains, without tags above the words. Nothing
is added to the model: its checkpoint loads everywhere as before. It gives no trees.

    examples = [encode_sentence(tokenizer, sentence.words, sentence.labeled_spans) for sentence in treebank]
    trainer = TreePlantingTrainer(
        model, args, planting=TreePlantingArguments(), train_dataset=examples, data_collator=TreePlantingCollator(0)
    )

Source: Yoshida, Someya and Oseki, "Tree-Planted Transformers: Unidirectional Transformer Language Models with Implicit
Syntactic Supervision" (Findings of ACL 2024), with exponential supervision; `train.py` and
`preprocess_constituency.py` of the authors' code. Theirs leaves the tags of a treebank in constituency trees, if it has
any: two edges more between all words.

Shapes: B sentences, T tokens, W words, begin and end token included. Spans are half-open.
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

# Below this, attention counts as this, as in the authors' code.
_LEAST = 1e-30


@dataclass
class TreePlantingArguments:
    """Which head the loss reads, and how much it counts; the defaults are those of the authors' example."""

    planting_layer: int | None = option(None, "Layer of the head, counted from 1. Default: the last one.", minimum=1)
    planting_head: int = option(0, "Attention head in that layer. The first head is 0.", minimum=0)
    planting_weight: float = option(0.5, "Factor of the loss. 0 trains a plain language model.", minimum=0)

    def attention(self, attentions: Sequence[Tensor]) -> Tensor:
        """The attention [B, T, T] that the loss reads, from a model that was called with `output_attentions=True`."""
        if not attentions:
            raise ValueError("The model returns no attention, so no tree can be planted in it. Choose another model.")
        layer = len(attentions) if self.planting_layer is None else self.planting_layer
        if layer > len(attentions):
            raise ValueError(f"planting_layer is {layer}, but the layers are 1 to {len(attentions)}.")
        heads = attentions[layer - 1]
        if self.planting_head >= heads.shape[1]:
            raise ValueError(f"planting_head is {self.planting_head}, but the heads are 0 to {heads.shape[1] - 1}.")
        return heads[:, self.planting_head]


def edge_counts(spans: Sequence[tuple[int, int]], num_words: int) -> Tensor:
    """Number of edges between the words of a sentence, begin and end token included: [n + 2, n + 2], 0 on the diagonal.

    With n_i constituents around word i, and n_ij around both i and j, there are n_i + n_j - 2 n_ij + 2. `spans` are the
    half-open word spans of all s constituents, the whole sentence and unary chains included. Cost: O(n^2 s).
    """
    word = torch.arange(num_words)
    inside = torch.zeros(len(spans) + 1, num_words + 2)
    inside[0] = 1  # the node above the tree
    if spans:
        start, end = torch.tensor(spans)[..., None].unbind(1)
        inside[1:, 1:-1] = ((word >= start) & (word < end)).float()
    around, both = inside.sum(0), inside.T @ inside
    return (around[:, None] + around - 2 * both + 2).fill_diagonal_(0)


def dependency_edges(heads: Sequence[int]) -> Tensor:
    """Number of arcs between the words of a sentence in its dependency tree, as `edge_counts` has them.

    `heads` has the place of each word's head, -1 for the root, which hangs from the node above the tree; the tree need
    not be projective. Source: the targets of the authors' own models. Cost: O(n^2 d) for trees of depth d.
    """
    ways = []  # of each word, itself and the words above it
    for word in range(len(heads)):
        ways.append([word])
        while heads[ways[-1][-1]] >= 0:
            ways[-1].append(heads[ways[-1][-1]])
    above = torch.zeros(len(heads) + 2, len(heads))
    for word, way in enumerate(ways, 1):
        above[word, way] = 1
    depth = above.sum(1).clamp_min(1)  # below the node above the tree
    return (depth[:, None] + depth - 2 * (above @ above.T)).fill_diagonal_(0)


def tree_planting_loss(attention: Tensor, word_spans: Tensor, edges: Tensor) -> Tensor:
    """The loss of tree-planting in nats: the mean over the words of the batch but the first one of each sentence.

    `attention` [B, T, T] is that of one head, `word_spans` [B, W, 2] the tokens of each word, (0, 0) = padding, `edges`
    [B, W, W] are `edge_counts`; begin and end token count as words. Cost: O(W T^2) for each sentence.
    """
    token = torch.arange(attention.shape[1], device=attention.device)
    start, end = word_spans[..., None].unbind(2)
    of_word = ((token >= start) & (token < end)).to(attention.dtype)  # [B, W, T]
    # A token is predicted one position before its own.
    given = of_word[:, 1:, 1:] @ attention[:, :-1, :-1] @ of_word[:, :-1, :-1].mT
    is_word = end[:, 1:, 0] > 0
    before = is_word[..., None] & torch.ones_like(given, dtype=torch.bool).tril()
    wide = torch.promote_types(attention.dtype, torch.float32)
    given = given.to(wide).masked_fill(~before, 0.0)
    share = (given / given.sum(2, keepdim=True).clamp_min(_LEAST)).clamp_min(_LEAST)
    target = (-edges[:, 1:, :-1].to(wide)).masked_fill(~before, float("-inf"))
    target = target.masked_fill(~is_word[..., None], 0.0).softmax(2) * before
    losses = F.kl_div(share.log(), target, reduction="none").sum(2)
    return (losses * is_word).sum() / is_word.sum()


# ---------------------------------------------------------------------------------------------- examples
def encode_sentence(
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[str],
    labeled_spans: Sequence[tuple[str, int, int]] = (),
    heads: Sequence[int] | None = None,
) -> dict[str, list[Any]]:
    """Encode a sentence and its tree for `TreePlantingCollator`: of (label, i, j), or of `heads` (-1 = the root).

    Returns `input_ids`; `word_spans`, begin and end token included; and `spans` of the tree, in words, or `heads`.
    """
    encoded = encode_framed(tokenizer, words)
    length = len(encoded["input_ids"])
    word_spans = [(0, 1), *encoded["word_spans"], (length - 1, length)]
    tree = {"spans": [(i, j) for _, i, j in labeled_spans]} if heads is None else {"heads": list(heads)}
    return {**encoded, "word_spans": word_spans, **tree}


@dataclass
class TreePlantingCollator:
    """Sentences of `encode_sentence` -> a right-padded batch for `TreePlantingTrainer`; any `pad_token_id` will do."""

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate sentences: `input_ids`, `attention_mask`, `labels`, `word_spans` and `edges`."""
        edges = [
            dependency_edges(row["heads"]) if "heads" in row else edge_counts(row["spans"], len(row["word_spans"]) - 2)
            for row in rows
        ]
        most = max(map(len, edges))
        edges = [F.pad(row, (0, most - len(row))) for row in edges]
        return {**pad_framed(rows, self.pad_token_id), "edges": pad_sequence(edges, True)}


# ---------------------------------------------------------------------------------------------- training
class TreePlantingTrainer(TreeLossTrainer):
    """`Trainer` of a causal language model that adds the loss of tree-planting to the model's own in training.

    The log has its mean, `planting_loss`. The model computes its attention step by step ("eager"), as other
    implementations do not return it. In training, the loss sees attention after its dropout, as in the authors'
    program. `data_collator` is a `TreePlantingCollator`.
    """

    loss_name, tree_inputs, asks_for = "planting_loss", ("word_spans", "edges"), "output_attentions"

    def __init__(self, *args: Any, planting: TreePlantingArguments, **options: Any):
        super().__init__(*args, weight=planting.planting_weight, **options)
        self.planting = planting
        self.model.set_attn_implementation("eager")

    def tree_loss(self, outputs: Any, trees: dict[str, Tensor]) -> Tensor:
        """See `tree_planting_loss`."""
        return tree_planting_loss(self.planting.attention(outputs.attentions), **trees)
