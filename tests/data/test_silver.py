"""`synlm silver`, with a parser that answers as Stanza 1.15 does."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_synlm.cli import main
from hf_synlm.data import silver
from hf_synlm.data.treebank import read_treebank
from tests.helpers.commands import fail


class Pipeline:
    """Flat trees over the words; the keyword arguments of the last call are kept in `asked`."""

    asked: dict = {}

    def __init__(self, language, **options):
        Pipeline.asked = {"language": language, **options}
        if language == "xx":
            raise FileNotFoundError("no network\n")
        known = {name: package for name, package in options["processors"].items() if package != "unknown"}
        self.processors = dict.fromkeys(known)
        self.load_list = [(name, [SimpleNamespace(package=package)]) for name, package in known.items()]

    def stream(self, lines, batch_size):
        for line in lines:
            leaves = " ".join(f"(X {word})" for word in line.replace("(", "-LRB-").split())
            trees = [SimpleNamespace(constituency=f"(ROOT (S {leaves}))")] if line != "\u200b" else []
            yield SimpleNamespace(sentences=trees, text=line)


@pytest.fixture
def stanza(monkeypatch):
    module = ModuleType("stanza")
    module.Pipeline, module.DownloadMethod = Pipeline, SimpleNamespace(REUSE_RESOURCES="reuse")
    monkeypatch.setitem(sys.modules, "stanza", module)
    monkeypatch.setattr("hf_synlm.cli.treebanks.version", lambda name: "1.15.0")


@pytest.mark.usefixtures("stanza")
def test_silver_trees_become_training_data(tmp_path):
    (tmp_path / "in.txt").write_text("We agree .\n\nYes ( no\n", encoding="utf-8")
    command = ["silver", str(tmp_path / "in.txt"), "--out", str(tmp_path / "silver.mrg")]
    assert main([*command, "--models", str(tmp_path), "--words", "keep", "--package", "wsj"]) == 0
    asked = Pipeline.asked
    assert asked["processors"] == {"tokenize": "default", "pos": "default", "constituency": "wsj"}
    assert asked["dir"] == str(tmp_path) and asked["tokenize_pretokenized"] and asked["tokenize_no_ssplit"]
    facts = json.loads((tmp_path / "silver.mrg.meta.json").read_text())
    assert facts["packages"]["constituency"] == ["wsj"] and (facts["trees"], facts["stanza"]) == (2, "1.15.0")
    assert main(["treebank", str(tmp_path / "silver.mrg"), "--out", str(tmp_path / "train.txt")]) == 0
    assert [s.words for s in read_treebank(tmp_path / "train.txt")] == [("We", "agree", "."), ("Yes", "-LRB-", "no")]
    assert main(command) == 2  # the output exists


@pytest.mark.usefixtures("stanza")
def test_a_stopped_run_continues(tmp_path, capsys, monkeypatch):
    """What was parsed before a line without words is kept, though the text changes; other parsers begin anew."""
    text, out = tmp_path / "in.txt", tmp_path / "silver.mrg"
    text.write_text("a b\nc d\n\u200b\ne f\na b\n", encoding="utf-8")
    command = ["silver", str(text), "--out", str(out)]
    assert fail(capsys, *command) and not out.exists()
    text.write_text("a b\nc d\ne f\na b\n", encoding="utf-8")
    assert "holds results of words split instead of keep" in fail(capsys, *command, "--words", "keep")
    parsed, stream = [], Pipeline.stream

    def note(self, lines, batch_size):
        parsed.extend(lines)
        return stream(self, lines, batch_size)

    monkeypatch.setattr(Pipeline, "stream", note)
    assert main(command) == 0 and parsed == ["e f"]
    assert [s.words for s in read_treebank(out)] == [("a", "b"), ("c", "d"), ("e", "f"), ("a", "b")]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.usefixtures("stanza")
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a b\n", ["--language", "xx"], "cannot load a parser of 'xx': no network Its parsers"),
        ("a b\n", ["--package", "unknown"], "it has no package unknown that parses"),
        ("\u200b\n", [], "the parser finds no word"),
        ("\n", [], "holds no text"),
    ],
)
def test_what_cannot_be_parsed(text, options, message, tmp_path, capsys):
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    assert message in fail(capsys, "silver", tmp_path / "in.txt", "--out", tmp_path / "out.mrg", *options)
    assert not (tmp_path / "out.mrg").exists()


def test_without_stanza(monkeypatch):
    monkeypatch.setitem(sys.modules, "stanza", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[silver\]'"):
        silver.load_parser()
