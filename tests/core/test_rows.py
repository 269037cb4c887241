"""Rows of tokens come to the left end and back, and holes and empty rows have one error."""

import pytest
import torch

from hf_synlm.core.rows import Rows, check_rows, count_runs


def test_tokens_move_to_the_left_end_and_back() -> None:
    ids = torch.tensor([[9, 5, 6, 9], [4, 9, 9, 9], [9, 9, 9, 9]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    rows = Rows.of(ids, mask)
    assert rows.ids.tolist() == [[5, 6], [4, 0], [0, 0]]
    assert rows.present.tolist() == [[True, True], [True, False], [False, False]]
    assert (rows.lengths, rows.count.tolist(), rows.first.tolist()) == ([2, 1, 0], [2, 1, 0], [1, 0, 0])
    assert rows.restore(rows.align(ids)).tolist() == [[0, 5, 6, 0], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert rows.active(0).tolist() == [True, True, False]
    assert Rows.of(ids[2:], mask[2:]).ids.shape == (1, 0) and Rows.of(ids[2:], mask[2:], least=1).ids.shape == (1, 1)


def test_holes_and_empty_rows() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert count_runs(mask).tolist() == [1, 2, 0]
    check_rows(mask[:1])
    with pytest.raises(ValueError, match=r"attention_mask leaves holes inside row 1: its tokens must stand side"):
        check_rows(mask)
    with pytest.raises(ValueError, match=r"Row 1 of input_ids has no token .*Leave empty texts out"):
        check_rows(mask[[0, 2]])
    check_rows(mask[[0, 2]], may_be_empty=True)
