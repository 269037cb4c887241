"""Levels of the searches are split by lines; what node pools hold, the searches prove."""

import torch

from hf_synlm.search.stack import Levels


def test_levels_are_split_by_lines() -> None:
    """Groups of lines hold all rows, each with its own lines and levels."""
    levels = Levels([5, 4, 4, 1], torch.device("cpu"))
    table = levels.lines(torch.arange(14)[None], -1)[0]
    for width in (1, 2, 3, 5, 9):
        found = []
        for lines, rows, part in levels.split(width):
            group = part.lines(torch.arange(14)[rows][None], -1)[0]
            assert len(group) <= width
            expected = table[lines]
            assert torch.equal(group, expected[:, : group.shape[1]]) and (expected[:, group.shape[1] :] == -1).all()
            found += torch.arange(14)[rows].tolist()
        assert sorted(found) == list(range(14))
