"""The demo: what it shows of a model, and its page."""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scoring_models import model_and_tokenizer

SENTENCE = "We ask for <peace> and courage"


@pytest.fixture(scope="module")
def app() -> Any:
    path = Path(__file__).resolve().parents[2] / "examples" / "app.py"
    spec = importlib.util.spec_from_file_location("demo_app", path)
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
    searches = architecture in ("gpst", "rnng")
    assert 1 <= len(trees) <= (3 if searches else 1)
    for word in SENTENCE.split():
        assert word in trees[0][3]
    assert "<svg" in html and "&lt;peace&gt;" in html and "<peace>" not in html
    with pytest.raises(ValueError, match="no word"):
        app.analyse(model, tokenizer, "  ", 4, 3)


def test_a_model_without_trees_is_named(app: Any, tmp_path: Path, capsys: Any) -> None:
    model, tokenizer = model_and_tokenizer("gpt2")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        app.main([str(tmp_path)])
    assert "GPT2LMHeadModel, which has no trees" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        app.main([str(tmp_path / "nowhere")])


def test_page_answers(app: Any) -> None:
    """As a program calls the page."""
    client = importlib.import_module("gradio_client")
    model, tokenizer = model_and_tokenizer("gpst")
    page = app.build(model, tokenizer, "test")
    _, url, _ = page.launch(server_name="127.0.0.1", share=False, prevent_thread_lock=True, quiet=True)
    try:
        shown = {
            part["props"].get("label"): part["props"].get("value") for part in page.get_config_file()["components"]
        }
        assert "<svg" in shown["Trees"] and [row[0] for row in shown["Words"]["data"]] == app.EXAMPLE.split()
        (button,) = (k for k, part in page.blocks.items() if getattr(part, "value", None) == "Parse")
        (wired,) = page.get_config_file()["dependencies"]
        assert (button, "click") in map(tuple, wired["targets"]) and wired["api_name"] == "analyse"
        html, words, trees = client.Client(url, verbose=False).predict(SENTENCE, 4, 3, api_name="/analyse")
    finally:
        page.close()
    assert "<svg" in html and words["headers"] == app.WORD_COLUMNS and len(trees["data"]) in (2, 3)
