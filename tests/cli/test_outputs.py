# SPDX-License-Identifier: Apache-2.0
"""Outputs that cannot be written or are written by somebody else, and folders of models that lack something."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hf_synlm.cli import app
from hf_synlm.data.files import folder_writer, lock_output, release_outputs, write_text
from hf_synlm.data.samples import sample_path
from hf_synlm.training.programs import train_treereg
from tests.helpers.commands import fail

HOLD = (
    "import sys; sys.modules['synlm'] = None; from hf_synlm.data.files import lock_output; "
    "lock_output(sys.argv[1]); print('locked', flush=True)"
)


def test_a_file_or_folder_that_another_process_writes_is_refused(capsys, tmp_path: Path, saved_models: Path) -> None:
    path, text = tmp_path / "out", tmp_path / "a.txt"
    write_text(text, "the dog\n")
    writer = [sys.executable, "-c", f"{HOLD}; sys.stdin.read()", str(path)]  # until its input ends
    with subprocess.Popen(writer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        for command in (
            ("parse", text, "--model", saved_models / "on_lstm", "--out", path),
            ("train", "rnng", "--config", "rnng_tiny", "--output-dir", path),
        ):
            said = f"Another process writes {path}. Wait until it ends, or choose another name."
            assert fail(capsys, *command) == said
        assert not path.exists()
        process.kill()
    lock_output(path)  # a process that dies keeps nothing
    lock_output(path)
    release_outputs()


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        with Path("/dev/full").open("wb", buffering=0) as device:
            device.write(b"x")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/a.txt'"):
        write_text(tmp_path / "a.txt", "x")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/b'"), folder_writer(tmp_path / "b"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_pipe_that_closes_is_no_error(tmp_path: Path) -> None:
    trees = tmp_path / "trees.mrg"
    trees.write_text("(S (NP (DT the) (NN dog)) (VP (VBD ran)))\n" * 4000)
    with subprocess.Popen(
        [sys.executable, "-c", "from synlm import main; raise SystemExit(main())", "draw", str(trees)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("kind", ["RNNG", "PCFG"])
def test_treereg_names_the_model_that_has_no_hidden_states(kind: str, tmp_path: Path) -> None:
    model = str(Path(__file__).parents[2] / "model_cards" / f"{kind.lower()}-mini")
    options = ["--model-name-or-path", model, "--output-dir", str(tmp_path / "run"), "--train-files"]
    with pytest.raises(ValueError) as caught:
        train_treereg.main([*options, str(sample_path("trees.valid.txt"))])
    assert str(caught.value) == (
        f"TreeReg needs a model with hidden states; {kind} ({model}) has none, because it sums over derivations. Name "
        "another --model-name-or-path."
    )


FILES = ("model.safetensors", "config.json", "tokenizer.json")


def _without_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return f"'{folder}' has no tokenizer.json. Get it again, or save the tokenizer there."


def _with_null(folder: Path) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": None}))
    return "Field 'hidden_size' expected int, got NoneType (value: None)"


def _with_pointer(folder: Path, name: str) -> str:
    file = folder / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return f"'{file}' is a Git LFS pointer, not the file. Get it by `git lfs pull` in its folder."


@pytest.mark.parametrize("damage", [_without_tokenizer, _with_null, *(partial(_with_pointer, name=n) for n in FILES)])
def test_damaged_folders_are_refused_by_what_they_lack(damage, tmp_path: Path, capsys, saved_models: Path) -> None:
    shutil.copytree(saved_models / "gpst", tmp_path / "model")
    write_text(tmp_path / "a.txt", "the dog\n")
    message = damage(tmp_path / "model")
    assert fail(capsys, "parse", tmp_path / "a.txt", "--model", tmp_path / "model").endswith(message)


def test_locks_end_with_the_command(tmp_path: Path) -> None:
    lock_output(tmp_path / "a")
    app.main(["--version"])
    subprocess.run([sys.executable, "-c", HOLD, tmp_path / "a"], check=True)


@pytest.mark.parametrize("command", [["parse"], ["surprisal"], ["evaluate", "perplexity"]])
def test_a_beam_for_a_model_without_search_is_refused(command, tmp_path: Path, capsys, saved_models: Path) -> None:
    write_text(tmp_path / "a.txt", "the dog\n")
    options = (tmp_path / "a.txt", "--model", saved_models / "on_lstm", "--num-beams", 5)
    assert (
        fail(capsys, *command, *options)
        == "--num-beams: ONLSTMForCausalLM has no beam of trees. Leave --num-beams out."
    )
