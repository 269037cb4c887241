"""Atomic writes: what a killed process leaves behind, and what is never replaced."""

from pathlib import Path

import pytest

from hf_synlm.data.files import PARTIAL_SUFFIX, folder_writer, remove_partial, write_text


@pytest.mark.parametrize("restore", [remove_partial, lambda parent: folder_writer(parent / "model").__enter__()])
def test_a_replacement_that_was_interrupted_leaves_the_old_folder(tmp_path: Path, restore):
    (tmp_path / "model.old.partial").mkdir()
    write_text(tmp_path / "model.old.partial" / "a.txt", "old")
    restore(tmp_path)
    assert (tmp_path / "model" / "a.txt").read_text() == "old"


def test_two_writers_with_marks_do_not_meet(tmp_path: Path):
    with folder_writer(tmp_path / "model", mark=".1") as first, folder_writer(tmp_path / "model", mark=".2") as second:
        assert first != second and first.name.endswith(PARTIAL_SUFFIX)
        write_text(first / "a.txt", "first")
    assert (tmp_path / "model" / "a.txt").read_text() == "first"
