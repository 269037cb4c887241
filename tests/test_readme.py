"""The README's examples run as a reader would type them: see `documentation.py`. Its numbers are those measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.documentation import ROOT, blocks, check_command, commands, make_inputs, run_page

README = ROOT / "README.md"
CARDS = ROOT / "model_cards"


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_page(README) >= 12
    printed = capsys.readouterr().out
    for promised in re.findall(
        r"# (?:.*: )?(\[.*\])$", "".join(block["code"] for block in blocks(README, "python")), re.M
    ):
        assert promised in printed, f"the README promises {promised}"


def test_drawing_is_what_the_code_prints():
    from hf_synlm.trees import brackets_to_tree, tree_to_spans
    from hf_synlm.viz import tree_to_text

    tree, words = brackets_to_tree("((fruit flies) (like (a banana)))")
    drawing = tree_to_text(words, tree_to_spans(tree))
    shown = "\n".join(block["code"] for block in blocks(README, "text"))
    assert all(line.strip() in shown for line in drawing.splitlines())


@pytest.mark.parametrize("command", commands(README))
def test_commands_exist(command: str):
    check_command(command)


def test_numbers_of_the_checkpoints_are_those_measured():
    """Each row: name, size of the weights, F1 (with its method), word perplexity (with its estimator)."""
    rows = re.findall(r"^\| `([\w-]+-tiny)` \|(.*)\|$", README.read_text(encoding="utf-8"), re.M)
    assert {name for name, _ in rows} == {folder.name for folder in CARDS.iterdir() if folder.is_dir()}
    for name, row in rows:
        results = {file.stem: json.loads(file.read_text()) for file in (CARDS / name / "results").glob("*.json")}
        size = (CARDS / name / "model.safetensors").stat().st_size
        numbers = [
            results[result]["scores"][score]
            for result in sorted(results)
            for score in ("f1", "word_perplexity")
            if result != "training" and score in results[result]["scores"]
        ]
        for text in (f"{size / 1e6:.2f} MB", *(f"{number:.1f}" for number in numbers)):
            assert text in row, (name, text)


def test_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)}
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target
