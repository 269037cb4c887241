"""The README's examples run as a reader would type them (see `documentation.py`); its pictures are what is measured."""

import json
import re
import runpy
from pathlib import Path

from tests.helpers.documentation import ROOT

README = ROOT / "README.md"
CARDS = ROOT / "model_cards"


def test_the_pictures_are_what_the_script_draws(tmp_path: Path):
    """Words, labels and numbers, in the order in which they are drawn."""
    script = runpy.run_path(str(ROOT / "docs" / "build_hooks" / "pictures.py"))
    pictures = {"tree": script["tree_picture"]()}
    for name, function in (("speed", "speed"), ("gpst-learning", "learning"), ("free-text", "free_text")):
        script[f"{function}_picture"](tmp_path / f"{name}.svg")
        pictures[name] = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    for name, picture in pictures.items():
        shown = (ROOT / "docs" / "assets" / f"{name}.svg").read_text(encoding="utf-8")
        assert re.findall(r">([^<\n]+)</text>", shown) == re.findall(r">([^<\n]+)</text>", picture)


def test_numbers_of_the_tiny_checkpoints_are_those_measured():
    """Each row: name, size of the weights, F1 (with its method), word perplexity (with its estimator)."""
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+-tiny)` \|(.*)\|$", text, re.M)
    assert {name for name, _ in rows} == {folder.name for folder in CARDS.glob("*-tiny")}
    for name, row in rows:
        results = {file.stem: json.loads(file.read_text()) for file in (CARDS / name / "results").glob("*.json")}
        (weights,) = (CARDS / name).rglob("*model.safetensors")
        size = weights.stat().st_size
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
            assert (ROOT / target.partition("#")[0]).exists(), target
