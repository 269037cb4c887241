"""Atomic writes: what a killed process leaves behind, and what is never replaced."""

from pathlib import Path

import pytest

from hf_synlm.data.files import PARTIAL_SUFFIX, check_output, folder_writer, remove_partial, write_text


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path):
    folder = tmp_path / "model"
    with pytest.raises(RuntimeError, match="stopped"), folder_writer(folder) as partial:
        write_text(partial / "a.txt", "new")
        raise RuntimeError("stopped")
    assert list(tmp_path.iterdir()) == []
    for text in ("old", "new"):
        with folder_writer(folder) as partial:
            write_text(partial / "a.txt", text)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "a.txt"]
    assert (folder / "a.txt").read_text() == "new"


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


def test_outputs_are_checked_before_anything_is_computed(tmp_path: Path):
    path = tmp_path / "new" / "out.tsv"
    assert check_output(path) == path and not path.parent.exists()
    write_text(path, "old")
    with pytest.raises(ValueError, match="exists. Choose another name, or pass --overwrite"):
        check_output(path)
    assert check_output(path, overwrite=True) == path
    for wrong in (tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="is a folder or a device"):
            check_output(wrong, overwrite=True)
    with pytest.raises(ValueError, match="no files can be made in"):
        check_output("/proc/out.tsv")
