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


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_to_drop(p, training):
    values, ids = torch.rand(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    assert locked_dropout(values, p, training) is values
    assert embedding_dropout(values, ids, 5, p, training) is values
    assert weight_dropout(values[0], 0.0, training, rescale=False).data_ptr() == values[0].data_ptr()
