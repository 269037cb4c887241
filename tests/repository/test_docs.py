"""The documentation site: its code runs, its commands exist. `make docs` checks its links."""

import importlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from hf_synlm.data.brackets import brackets_to_spans
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.hub.info import shipped_files
from hf_synlm.models import ARCHITECTURES
from hf_synlm.viz import tree_to_text
from tests.helpers.documentation import ROOT, blocks, check_command, commands, make_inputs, run_page

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "api" not in page.parts)]
TEXT = {".py", ".md", ".yaml", ".ipynb", ".txt"}
WITH_CODE = [page for page in PAGES if blocks(page, "python") or commands(page)]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch, capsys):
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_page(page)
    printed = capsys.readouterr().out
    code = "".join(block["code"] for block in blocks(page, "python"))
    for promised in re.findall(r"^print\(.*# (?:.*: )?(\[.*\])$", code, re.M):
        assert promised in printed, f"{name(page)} promises {promised}"


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_architectures_are_known_where_models_are_loaded(page: Path):
    """In the tests hf_synlm is always imported; a reader begins with the page."""
    code = "\n".join(block["code"] for block in blocks(page, "python") if not block["marker"])
    before, loads, _ = code.partition("AutoModelForCausalLM.from_pretrained(")
    if loads:
        assert re.search(r"^(import|from) hf_synlm\b", before, re.M)


def test_commands_exist():
    for page in WITH_CODE:
        for line in commands(page):
            check_command(line)


def test_calls_from_r_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """R calls Python by reticulate; here are the same calls in Python."""
    (code,) = (block["code"] for block in blocks(DOCS / "psycholinguistics.md", "r") if "reticulate" in block["code"])
    for ours, python in {r"library\(.*": "", "<-": "=", r"\$": ".", r"\bimport\(": "load(", r"(\d)L\b": r"\1"}.items():
        code = re.sub(ours, python, code)
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"load": importlib.import_module, "list": lambda *values: [*values], "TRUE": True}
    exec(code, names)
    assert names["words"]["word"].tolist()[:3] == ["the", "people", "of"]
    assert names["words"]["stack_depth"].notna().all()
    assert "(NP We)" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=name)
def test_notebooks_run(notebook: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(notebook.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    # The commands of a page score the same words with beams of the usual width.
    load, narrow = TextScorer.from_pretrained, {"action_beam_size": 4}
    monkeypatch.setattr(
        TextScorer,
        "from_pretrained",
        lambda path, **more: load(path, **more, num_beams=1, search_options=narrow if "rnng" in path else {}),
    )
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


def test_drawing_is_what_the_code_prints():
    spans, words = brackets_to_spans("((fruit flies) (like (a banana)))")
    drawing = tree_to_text(words, spans)
    shown = "\n".join(block["code"] for block in blocks(DOCS / "getting-started.md", "text"))
    assert all(line.strip() in shown for line in drawing.splitlines())


def test_nothing_asks_for_a_package_of_our_name():
    """The index has none, and anybody could put one there."""
    files = [*PAGES, *(DOCS / "api").glob("*.md"), *(ROOT / "examples").iterdir(), *(ROOT / "model_cards").rglob("*.*")]
    files += [file for folder in ("hf_synlm", "training") for file in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "hf_synlm").rglob("requirements.txt"), *(ROOT / "examples").rglob("requirements.txt")]
    wrong = re.compile(r"pip install[^`\n]*hf_synlm|hf_synlm\[|^hf_synlm$", re.MULTILINE)
    files = [file for file in files if file.suffix in TEXT]
    assert not [name(file) for file in files if wrong.search(file.read_text(encoding="utf-8"))]


def test_table_of_files_that_ship():
    pytest.importorskip("latex2mathml")  # the extra [docs]
    shipped_table = runpy.run_path(str(ROOT / "docs" / "build_hooks" / "site.py"))["shipped_table"]
    head, *rows, total = (line.strip("|").split("|") for line in shipped_table().splitlines())
    assert [name.strip() for name in head[2:]] == list(ARCHITECTURES)
    files, column = shipped_files("palm"), ARCHITECTURES.index("palm") + 2
    assert f" {len(files)} files, {sum(files.values()):,} lines " in total
    assert {row[0].strip() for row in rows if row[column].strip() == "x"} == set(files)
