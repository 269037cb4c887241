# SPDX-License-Identifier: Apache-2.0
"""Codecs of given trees: what they encode comes back, and their steps are those of the derivation."""

import random

import pytest
import torch

from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.trees.codecs import ActionCodec, AttachmentCodec, LabeledCodec, TreeCodec, binary_token_spans
from hf_synlm.trees.spans import fold_tokens

BINARY = (
    TreeCodec(),
    ActionCodec(closing=(9,)),
    ActionCodec(),
    AttachmentCodec(closing=(9,), ends=(-100,)),
    AttachmentCodec(closing=(8, 9), ends=(0, -100)),
)
LABELED = tuple(LabeledCodec(system, ("A", "B")) for system in ("top_down", "in_order", "binary"))


def sentence(seed: int) -> tuple[list[int], list[bool], list[tuple[str, int, int]]]:
    """Ids, word ends and a binary tree over words of one to three pieces."""
    draw = random.Random(seed)
    pieces = [draw.randint(1, 3) for _ in range(draw.randint(2, 7))]
    ends = [piece == count - 1 for count in pieces for piece in range(count)]
    return list(range(len(ends))), ends, [(draw.choice("AB"), i, j) for i, j in random_tree(len(pieces), draw)]


@pytest.mark.parametrize("codec", [*BINARY, *LABELED])
@pytest.mark.parametrize("seed", range(8))
def test_trees_come_back(codec: TreeCodec, seed: int) -> None:
    ids, ends, tree = sentence(seed)
    row = codec.encode(ids, ends, tree)
    assert row["input_ids"][: len(ids)] == ids and row["word_ends"] == ends
    found = codec.decode(row)
    assert [span[1:] for span in found] == [span[1:] for span in tree]
    assert found == tree or codec.labels == ()
    assert codec.key(codec.encode(ids, ends, [*tree[:-1], tree[-1]])) == codec.key(row)
    assert not codec.unknown(tree, sum(ends))


def test_unary_chains_and_words_come_back() -> None:
    tree = [("B", 0, 1), ("A", 0, 1), ("A", 0, 3), ("B", 0, 3)]
    for codec in LABELED[:2]:
        assert codec.decode(codec.encode(range(4), [True, False, True, True], tree)) == tree
    assert LABELED[0].unknown([("C", 0, 1), *tree], 3) == [("C", 0, 1)]
    assert LABELED[2].unknown([("A", 0, 2), ("A", 0, 3), ("B", 0, 3)], 3) == [("B+A", 0, 3)]


@pytest.mark.parametrize("codec", [*BINARY, *LABELED])
def test_steps_stand_where_their_constituents_end(codec: TreeCodec) -> None:
    """Every token is read before the decisions behind it; a constituent is closed when its last token has been read."""
    rows = [codec.encode(*sentence(seed)) for seed in (1, 2, 3)]
    batch = codec.pad(rows, pad_token_id=7)
    lengths = [len(row["input_ids"]) for row in rows]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 7).all()
    actions, before = codec.steps(batch)
    assert actions.shape == before.shape
    for row, length, taken, places in zip(rows, lengths, actions, before, strict=True):
        places = places[taken >= 0].tolist()
        assert places == sorted(places) and places[-1] <= length
        if codec.field == "attachments":
            assert taken[taken >= 0].tolist() == [place for place in row["attachments"] if place >= 0]
            continue
        spans = binary_token_spans([span[1:] for span in codec.decode(row)], row["word_ends"])
        assert all(places.count(end) >= [j for _, j in spans].count(end) for end in range(length)) or codec.labels
        assert fold_tokens(spans, row["word_ends"]) == [span[1:] for span in codec.decode(row)]


def test_padding_differs_between_codecs() -> None:
    codecs = [codec for codec in (*BINARY, *LABELED) if codec.field != "spans"]
    batches = [codec.pad([codec.encode(*sentence(seed)) for seed in (1, 2, 3)]) for codec in codecs]
    smallest = [int(batch[codec.field].min()) for codec, batch in zip(codecs, batches, strict=True)]
    assert smallest == [-1, -1, -100, -100, 0, 0, 0]
    assert batches[-1]["word_ends"].dtype is torch.bool
