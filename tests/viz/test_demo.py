"""The demo: what it shows of a model, and its page."""

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load

from hf_synlm.evaluation.text.surprisal import columns
from hf_synlm.evaluation.text.tables import read_rows, table_text
from tests.helpers.commands import run
from tests.helpers.refusals import raised, refused
from tests.helpers.scoring_models import model_and_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = "We ask for <peace> and courage"


@pytest.fixture(scope="module")
def app() -> Any:
    spec = importlib.util.spec_from_file_location("demo_app", ROOT / "examples" / "app.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("architecture", ["gpst", "rnng", "on_lstm", "prpn", "palm"])
def test_text_to_trees_and_surprisals(app: Any, architecture: str) -> None:
    model, tokenizer = model_and_tokenizer(architecture)
    html, words, trees = app.analyse(model, tokenizer, SENTENCE, num_beams=4, num_trees=3)
    assert [row[0] for row in words] == SENTENCE.split()
    assert all(math.isfinite(bits) for _, bits in words)
    assert 1 <= len(trees) <= (3 if architecture in ("gpst", "rnng") else 1)
    for word in SENTENCE.split():
        assert word in trees[0][3]
    assert "<svg" in html and "&lt;peace&gt;" in html and "<peace>" not in html
    refused("no word", app.analyse, model, tokenizer, "  ", 4, 3)


@pytest.mark.parametrize("architecture", ["gpst", "on_lstm"])
def test_file_to_the_table_of_the_command(app: Any, architecture: str, saved_models: Path, tmp_path, capsys) -> None:
    model, tokenizer = model_and_tokenizer(architecture)
    text = tmp_path / "text.txt"
    text.write_text(f"{SENTENCE}\n\nAmerica is back \u00e9\n", encoding="utf-8")
    names, rows = app.measure(model, tokenizer, text)
    assert [row[3] for row in rows] == [*SENTENCE.split(), "America", "is", "back", "\u00e9"]
    run(capsys, "surprisal", text, "--model", saved_models / architecture, "--out", tmp_path / "written.tsv")
    expected = list(read_rows(tmp_path / "written.tsv", "tsv"))
    assert len(rows) == len(expected) and names == list(expected[0])
    for row, fields in zip(rows, expected, strict=True):
        for value, field in zip(row, fields.values(), strict=True):
            if isinstance(value, float):
                assert value == pytest.approx(float(field or "nan"), rel=1e-5, abs=1e-5, nan_ok=True)
            else:
                assert str(value) == field


NO_TEXT = [
    (b"the people\ncaf\xe9\n", r"text\.txt:2: byte 0xe9 .* convert it to UTF-8"),
    (b"\n \n", "holds no text"),
    (b"item\tsentence\n1\tthe people agree\n", "has 2 columns, like a table: give plain text, one sentence per line"),
]


@pytest.mark.parametrize(("content", "message"), NO_TEXT)
def test_files_that_are_no_text(app: Any, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    refused(message, app.measure, *model_and_tokenizer("gpst"), tmp_path / "text.txt")


def test_a_model_without_trees_is_named(app: Any, saved_models: Path, tmp_path: Path, capsys: Any) -> None:
    raised(SystemExit, None, app.main, [str(saved_models / "gpt2")])
    assert "GPT2LMHeadModel, which has no trees" in capsys.readouterr().err
    raised(SystemExit, None, app.main, [str(tmp_path / "nowhere")])


def test_page_answers(app: Any, tmp_path: Path) -> None:
    """As a program calls the page."""
    client = importlib.import_module("gradio_client")
    (tmp_path / "text.txt").write_text(SENTENCE, encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(b"\xe9")
    model, tokenizer = model_and_tokenizer("gpst")
    page = app.build(model, tokenizer, "test")
    _, url, _ = page.launch(server_name="127.0.0.1", share=False, prevent_thread_lock=True, quiet=True)
    try:
        config = page.get_config_file()
        tabs = [part["props"]["label"] for part in config["components"] if part["type"] == "tabitem"]
        assert tabs == ["Sentence", "File"]
        shown = {part["props"].get("label"): part["props"].get("value") for part in config["components"]}
        assert "<svg" in shown["Trees"] and [row[0] for row in shown["Words"]["data"]] == app.EXAMPLE.split()
        (button,) = (k for k, part in page.blocks.items() if getattr(part, "value", None) == "Parse")
        parse, upload = config["dependencies"]
        assert (button, "click") in map(tuple, parse["targets"]) and parse["api_name"] == "analyse"
        assert [event for _, event in upload["targets"]] == ["upload"]
        caller = client.Client(url, verbose=False)
        html, words, trees = caller.predict(SENTENCE, 4, 3, api_name="/analyse")
        table, download = caller.predict(client.handle_file(tmp_path / "text.txt"), api_name="/measure")
        with pytest.raises(client.exceptions.AppError, match=r"^bad\.txt:1: byte 0xe9"):
            caller.predict(client.handle_file(tmp_path / "bad.txt"), api_name="/measure")
    finally:
        page.close()
    assert "<svg" in html and words["headers"] == app.WORD_COLUMNS and len(trees["data"]) in (2, 3)
    assert table["headers"] == columns("bits") and [row[3] for row in table["data"]] == SENTENCE.split()
    names, rows = app.measure(model, tokenizer, tmp_path / "text.txt")
    assert Path(download).read_text(encoding="utf-8") == table_text([columns("bits"), *rows])
    assert Path(download).name == "text.surprisals.tsv"


def test_folder_of_a_space(app: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    card = metadata_load(ROOT / "examples" / "space" / "README.md")
    assert card["sdk"] == "gradio" and card["app_file"] == "app.py" and len(card["short_description"]) <= 60
    assert f"gradio=={card['sdk_version']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f'requires-python = ">={card["python_version"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    # It starts the demo without arguments, by its variable.
    monkeypatch.setenv("SYNLM_MODEL", "nowhere-of-a-space")
    raised(SystemExit, None, app.main, [])
    assert "nowhere-of-a-space" in capsys.readouterr().err
    monkeypatch.delenv("SYNLM_MODEL")
    raised(SystemExit, None, app.main, [])
    assert "the following arguments are required: model" in capsys.readouterr().err
