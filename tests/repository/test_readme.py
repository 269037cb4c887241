"""The README's examples run as a reader would type them (see `documentation.py`); its pictures are what is measured."""

import json
import re
import runpy
from pathlib import Path

from tests.helpers.documentation import ROOT
from tests.helpers.refusals import refused

README = ROOT / "README.md"
CARDS = ROOT / "model_cards"


def test_the_pictures_are_what_the_script_draws(tmp_path: Path):
    """Words, labels and numbers, in the order in which they are drawn."""
    script = runpy.run_path(str(ROOT / "docs" / "build_hooks" / "pictures.py"))
    pictures = {"tree": script["tree_picture"]()}
    drawn = {"speed": "speed", "gpst-learning": "learning", "pcfg-growth": "growth", "free-text": "free_text"}
    for name, draw in drawn.items():
        script[f"{draw}_picture"](tmp_path / f"{name}.svg")
        pictures[name] = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    for name, picture in pictures.items():
        shown = (ROOT / "docs" / "assets" / f"{name}.svg").read_text(encoding="utf-8")
        assert re.findall(r">([^<\n]+)</text>", shown) == re.findall(r">([^<\n]+)</text>", picture)


def test_tables_behind_pictures_are_whole(tmp_path: Path):
    """Each row has the columns of its header; what was measured, its last cell, stands on the page."""
    read = runpy.run_path(str(ROOT / "docs" / "build_hooks" / "pictures.py"))["read_table"]
    tables = {file.stem: read(file) for file in (ROOT / "docs" / "assets").glob("*.csv")}
    for table, page in (("gpst-learning", "gpst-learning"), ("pcfg-growth", "speed")):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert [row for row in tables[table] if list(row.values())[-1] not in text] == []
    (tmp_path / "a.csv").write_text("run,f1\nseed 0, stopped,14.2\n")
    refused("longer", read, tmp_path / "a.csv")


def test_pictures_name_every_model_and_are_shown():
    docs = ROOT / "docs"
    pages = {page.name: page.read_text(encoding="utf-8") for page in docs.glob("*.md")}
    models = re.findall(r"^\| \[([^\]]+)\]\(models/", pages["index.md"], re.M)
    drawn = (docs / "assets" / "architecture.svg").read_text(encoding="utf-8")
    assert models and [model for model in models if f">{model}<" not in drawn] == []
    assert "(assets/tree.svg)" in pages["index.md"]
    for picture in (docs / "assets").glob("*.svg"):
        assert any(f"(assets/{picture.name})" in text for text in pages.values()), picture


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
