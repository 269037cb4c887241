# SPDX-License-Identifier: Apache-2.0
"""Treebanks as examples of the span parser: labels of spans and tags, batches, and how often each file is read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, normalizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_synlm.data.collate import LABEL_PADDING, encode_words
from hf_synlm.data.punctuation import BRACKET_OF
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.trees.treebank_parsing import EncodedSentence
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.trees.codecs import pad_inputs

# Rarer labels and tags are not learned.
LEAST = 5
# What treebanks write otherwise than other text.
_PLAIN = BRACKET_OF | {"``": '"', "''": '"', "\\/": "/"}
_NOT = Regex(r"(?<!\S)n't(?!\S)")


def tokenizer_of_treebanks(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """A tokenizer that reads words as treebanks write them (-LRB-, ``, n't) as this one reads (, " and not."""
    backend = tokenizer.backend_tokenizer
    rules = [normalizers.Replace(mark, plain) for mark, plain in _PLAIN.items()] + [normalizers.Replace(_NOT, "not")]
    backend.normalizer = normalizers.Sequence([*rules, *([backend.normalizer] if backend.normalizer else [])])
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=tokenizer.model_max_length, **special)


class SpanExample(NamedTuple):
    """A sentence, ids of labels by span, ids of tags."""

    sentence: EncodedSentence
    spans: list[tuple[int, int, int]]
    tags: list[int]


def label_chains(sentence: TreebankSentence) -> dict[tuple[int, int], str]:
    """The labels of each span, the top first, joined by spaces."""
    found: dict[tuple[int, int], str] = {}
    for label, i, j in sentence.labeled_spans:  # unary chains from bottom to top
        found[i, j] = f"{label} {found[i, j]}" if (i, j) in found else label
    return found


def labels_and_tags(sentences: Sequence[TreebankSentence]) -> dict[str, list[str]]:
    """The labels of spans and the tags that are frequent enough, the most frequent first."""
    labels = Counter(chain for sentence in sentences for chain in label_chains(sentence).values())
    counts = {"nonterminals": labels, "tags": Counter(tag for sentence in sentences for tag in sentence.tags)}
    kept = {kind: [name for name, n in count.most_common() if n >= LEAST] for kind, count in counts.items()}
    if not all(kept.values()):
        raise ValueError(f"The training trees are too few: no label, or no tag, occurs {LEAST} times. Give more trees.")
    return kept


def encode_spans(
    sentences: Iterable[TreebankSentence], tokenizer: PreTrainedTokenizerBase, config: Any
) -> list[SpanExample]:
    """Sentences as examples; a rare chain loses labels at its top until it is known, rare tags do not count."""
    label_of = {name: number for number, name in enumerate(config.nonterminals, 1)}
    tag_of = {name: number for number, name in enumerate(config.tags)}
    found = []
    for sentence in sentences:
        spans = []
        for (i, j), chain in label_chains(sentence).items():
            while chain and chain not in label_of:
                chain = chain.partition(" ")[2]
            spans += [(i, j, label_of[chain])] if chain else []
        ids, ends = encode_words(tokenizer, sentence.words)
        tags = [tag_of.get(tag, LABEL_PADDING) for tag in sentence.tags]
        found.append(SpanExample(EncodedSentence(tuple(ids), tuple(ends), sentence.words), spans, tags))
    return found


def collate_spans(batch: Sequence[SpanExample], pad_token_id: int) -> dict[str, Tensor]:
    """The arguments of `forward` for a batch."""
    counts = torch.tensor([len(example.tags) for example in batch])
    place = torch.arange(int(counts.max()) + 1)
    is_span = (place[:, None] < place) & (place <= counts[:, None, None])
    labels = torch.full(is_span.shape, LABEL_PADDING).masked_fill(is_span, 0)
    for row, example in enumerate(batch):
        i, j, label = torch.tensor(example.spans, dtype=torch.long).reshape(-1, 3).unbind(1)
        labels[row, i, j] = label
    ends = [torch.tensor(example.sentence.word_ends) for example in batch]
    tags = [torch.tensor(example.tags) for example in batch]
    return {
        **pad_inputs([example.sentence.ids for example in batch], pad_token_id),
        "word_ends": pad_sequence(ends, batch_first=True, padding_value=False),
        "labels": labels,
        "tag_labels": pad_sequence(tags, batch_first=True, padding_value=LABEL_PADDING),
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
