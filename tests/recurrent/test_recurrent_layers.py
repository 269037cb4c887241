"""Dropout of recurrent models: what shares a mask, what is rescaled, and when nothing happens."""

import pytest
import torch

from hf_synlm.recurrent.layers import embedding_dropout, keep_mask, locked_dropout, weight_dropout


@pytest.mark.parametrize(("rescale", "kept"), [(True, 1 / 0.7), (False, 1.0)])
def test_mask(rescale, kept):
    mask = keep_mask((400, 500), 0.3, torch.zeros(1, dtype=torch.float64), rescale)
    assert mask.dtype == torch.float64
    torch.testing.assert_close(mask.unique(), torch.tensor([0, kept], dtype=torch.float64))
    assert (mask == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)


def test_all_time_steps_share_a_mask():
    values = torch.rand(3, 50, 20) + 1
    dropped = locked_dropout(values, 0.5, training=True)
    zero = dropped == 0
    assert torch.equal(zero, zero[:, :1].expand_as(zero)) and not torch.equal(zero[0], zero[1])
    torch.testing.assert_close(dropped[~zero], 2 * values[~zero])


def test_all_occurrences_of_a_word_share_a_mask():
    weight = torch.rand(10, 6) + 1
    ids = torch.randint(0, 10, (4, 40))
    dropped = embedding_dropout(weight[ids], ids, 10, 0.4, training=True)
    gone = (dropped == 0).all(-1)
    assert torch.equal(gone, (dropped == 0).any(-1)) and 0 < gone.sum() < gone.numel()
    for word in range(10):
        assert len(gone[ids == word].unique()) == 1
    torch.testing.assert_close(dropped[~gone], weight[ids][~gone] / 0.6)


def test_weights():
    weight = torch.rand(30, 40) + 1
    authors = weight_dropout(weight, 0.25, True, rescale=False)
    assert torch.equal(authors[authors != 0], weight[authors != 0]) and (authors == 0).any()
    torch.testing.assert_close(weight_dropout(weight, 0.25, False, rescale=False), 0.75 * weight)
    awd = weight_dropout(weight, 0.25, True, rescale=True)
    torch.testing.assert_close(awd[awd != 0], weight[awd != 0] / 0.75)
    assert weight_dropout(weight, 0.25, False, rescale=True) is weight


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_to_drop(p, training):
    values, ids = torch.rand(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    assert locked_dropout(values, p, training) is values
    assert embedding_dropout(values, ids, 5, p, training) is values
    assert weight_dropout(values[0], 0.0, training, rescale=False).data_ptr() == values[0].data_ptr()
