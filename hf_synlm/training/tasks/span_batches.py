"""Treebanks as examples of the span parser: labels of spans and tags, batches, and how often each file is read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import encode_words, pad_inputs
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.training.engine.samplers import PaddedBatchSampler

NOT_SCORED = -100


class SpanExample(NamedTuple):
    """A sentence: tokens, which of them end a word, ids of labels by span, ids of tags."""

    ids: list[int]
    ends: list[bool]
    spans: list[tuple[int, int, int]]
    tags: list[int]


def label_chains(sentence: TreebankSentence) -> dict[tuple[int, int], str]:
    """The labels of each span, the top first, joined by spaces."""
    found: dict[tuple[int, int], str] = {}
    for label, i, j in sentence.labeled_spans:  # unary chains from bottom to top
        found[i, j] = f"{label} {found[i, j]}" if (i, j) in found else label
    return found


@dataclass
class SpanLabels:
    """Labels and tags of the parser; label 0 is no constituent."""

    nonterminals: Sequence[str]
    tags: Sequence[str]

    @classmethod
    def of(cls, sentences: Iterable[TreebankSentence], least: int) -> "SpanLabels":
        """Those that occur at least so often in sentences, the most frequent first."""
        labels, tags = Counter[str](), Counter[str]()
        for sentence in sentences:
            labels.update(label_chains(sentence).values())
            tags.update(sentence.tags)
        kept = [[name for name, count in counts.most_common() if count >= least] for counts in (labels, tags)]
        if not all(kept):
            raise ValueError(f"No label or no tag occurs {least} times. Give more trees, or lower min_label_frequency.")
        return cls(*kept)

    def encode(self, sentences: Iterable[TreebankSentence], tokenizer: PreTrainedTokenizerBase) -> list[SpanExample]:
        """Sentences as examples; a rare chain loses labels at its top until it is known, rare tags do not count."""
        label_of = {name: number for number, name in enumerate(self.nonterminals, 1)}
        tag_of = {name: number for number, name in enumerate(self.tags)}
        found = []
        for sentence in sentences:
            spans = []
            for (i, j), chain in label_chains(sentence).items():
                while chain and chain not in label_of:
                    chain = chain.partition(" ")[2]
                spans += [(i, j, label_of[chain])] if chain else []
            tags = [tag_of.get(tag, NOT_SCORED) for tag in sentence.tags]
            found.append(SpanExample(*encode_words(tokenizer, sentence.words), spans, tags))
        return found


def collate_spans(batch: Sequence[SpanExample], pad_token_id: int) -> dict[str, Tensor]:
    """The arguments of `forward` for a batch."""
    counts = torch.tensor([len(example.tags) for example in batch])
    place = torch.arange(int(counts.max()) + 1)
    is_span = (place[:, None] < place) & (place <= counts[:, None, None])
    labels = torch.full(is_span.shape, NOT_SCORED).masked_fill(is_span, 0)
    for row, example in enumerate(batch):
        i, j, label = torch.tensor(example.spans, dtype=torch.long).reshape(-1, 3).unbind(1)
        labels[row, i, j] = label
    ends = [torch.tensor(example.ends) for example in batch]
    tags = [torch.tensor(example.tags) for example in batch]
    return {
        **pad_inputs([example.ids for example in batch], pad_token_id),
        "word_ends": pad_sequence(ends, batch_first=True, padding_value=False),
        "labels": labels,
        "tag_labels": pad_sequence(tags, batch_first=True, padding_value=NOT_SCORED),
    }


class WeightedBatchSampler(PaddedBatchSampler):
    """Batches in which an epoch has each sample `weights` times: 2.3 is twice, and a third time in 3 of 10 epochs."""

    def __init__(self, weights: np.ndarray, *args: Any, **share: Any):
        super().__init__(*args, **share)
        self.weights = weights

    def samples(self, epoch: int) -> np.ndarray:
        """The samples of an epoch, by length."""
        draw = np.random.default_rng([self.seed, epoch, 1]).random(len(self.weights))
        times = self.weights.astype(int) + (draw < self.weights % 1)
        return np.repeat(self._by_length, times[self._by_length])
