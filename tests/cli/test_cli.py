"""The `synlm` command, as a user types it: files, exit codes, messages."""

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import math
import os
import re
import shlex
import shutil
import stat
import statistics
import sys
import threading
import tomllib
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch
import typer

from hf_synlm import __version__
from hf_synlm.cli.app import app, main
from hf_synlm.cli.evaluate import _drawable
from hf_synlm.data.samples import sample_path
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.suites.blimp import evaluate_pairs, read_pairs
from hf_synlm.evaluation.suites.syntaxgym import load_suite, score_regions, surprisals_of
from hf_synlm.evaluation.text import text_items
from hf_synlm.evaluation.text.surprisal import columns, score_words
from hf_synlm.evaluation.text.text_items import TextItem, read_items
from tests.evaluation.test_blimp import write_blimp
from tests.evaluation.test_syntaxgym import suite_data
from tests.helpers import warm_python
from tests.helpers.commands import fail, remarks, run
from tests.helpers.refusals import raised, refused
from tests.helpers.scoring_models import SENTENCES, scorer_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(saved_models: Path) -> dict[str, str]:
    """Folders of saved models by name."""
    return {path.name: str(path) for path in saved_models.iterdir()}


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([SENTENCES[0], "", 'He  said "no" 🙂']) + "\n", encoding="utf-8")
    return path


def read_tsv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


# ----------------------------------------------------------------------------------------------------- surprisal
@pytest.mark.parametrize("name", ["gpst", "gpt2"])
def test_surprisal(models, texts, name):
    out = texts.with_name("out.tsv")
    assert main(["surprisal", str(texts), "--model", models[name], "--out", str(out), "--device", "cpu"]) == 0
    rows = read_tsv(out)
    lines = texts.read_text(encoding="utf-8").split("\n")
    assert list(rows[0]) == columns("bits")
    assert [row["word"] for row in rows] == [word for line in lines for word in line.split()]
    assert [row["item"] for row in rows] == ["1"] * 7 + ["3"] * 4
    expected = score_words(scorer_of(name), [TextItem("", line) for line in lines])
    bits = [-p / math.log(2) for found in expected for p in found.log_probs.tolist()]
    assert [float(row["surprisal_bits"]) for row in rows] == pytest.approx(bits, abs=1e-3)
    assert all((row["lexical_bits"] == "") == (name == "gpt2") for row in rows)
    meta = json.loads(Path(f"{out}.meta.json").read_text(encoding="utf-8"))
    assert meta["options"]["estimator"] == ("exact" if name == "gpt2" else "beam_marginal")
    assert meta["options"]["unit"] == "bits" and meta["data"]["columns"] == columns("bits")
    assert meta["scores"]["words"] == len(rows) and meta["versions"]["hf_synlm"]
    assert len(meta["data"]["files"][0]["sha256"]) == 64 and meta["data"]["texts_in_windows"] == 0
    assert shlex.split(meta["command"])[:3] == ["synlm", "surprisal", str(texts)]


def test_texts_can_come_from_standard_input(models, texts, monkeypatch, capsys):
    def give(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    model, files = ["--model", models["gpt2"], "--device", "cpu"], []
    for source in (texts, "-"):
        give(texts.read_bytes())
        run(capsys, "surprisal", source, *model, "--out", out := texts.with_name("out.tsv"), "--overwrite")
        [described] = json.loads(Path(f"{out}.meta.json").read_text())["data"]["files"]
        files.append((out.read_bytes(), {**described, "path": "-"}))
    assert files[0] == files[1] and described["path"] == "-"
    give(b'{"sentence": "We ask"}\n')
    assert "| words | 2 |" in " ".join(run(capsys, "evaluate", "perplexity", "-", "--format", "jsonl", *model).split())
    give(b"We\n\xff\n")
    assert "-:2: byte 0xff is not utf-8" in fail(capsys, "evaluate", "perplexity", "-", *model)


def test_surprisal_by_several_beams(models, texts, capsys):
    """Each as a search of its own gives it; all else by the widest."""
    command = ["surprisal", texts, "--model", models["gpst"], "--device", "cpu", "--unit", "nats"]
    out = [texts.with_name(name) for name in ("two.tsv", "wide.tsv", "narrow.tsv")]
    widths = ["--num-beams", 6, "--num-beams", 1]
    said = remarks(capsys, *command, "--out", out[0], *widths)
    run(capsys, *command, "--out", out[1], *widths[:2])
    run(capsys, *command, "--out", out[2], *widths[2:])
    both, wide, narrow = map(read_tsv, out)
    assert list(both[0]) == [*columns("nats"), "surprisal_nats_b1", "surprisal_nats_b6"]
    assert [{name: row[name] for name in columns("nats")} for row in both] == wide
    a, b = ([float(row[f"surprisal_nats_b{width}"]) for row in both] for width in (1, 6))
    assert a == pytest.approx([float(row["surprisal_nats"]) for row in narrow], abs=1e-5)
    assert b == [float(row["surprisal_nats"]) for row in wide] and a != b
    bits = [abs(x - y) / math.log(2) for x, y in zip(a, b, strict=True)]
    assert f"mean absolute difference {sum(bits) / len(bits):.3g} bits" in said
    assert f"correlation {statistics.correlation(a, b):.4f}" in said
    assert f"above 1 bit: {sum(x > 1 for x in bits) / len(bits):.1%} of the words" in said
    meta = json.loads(Path(f"{out[0]}.meta.json").read_text(encoding="utf-8"))
    assert meta["options"]["num_beams"] == 6 and meta["data"]["columns"] == list(both[0])
    assert "holds results of one beam" in fail(capsys, *command, *widths, "--cache", texts.with_name("cache"))
    assert "Give one --model and one --num-beams" in fail(capsys, *command[:-2], *widths, "--lmzoo")


def test_surprisal_by_several_models(models, texts, capsys):
    """A column for each model, as by itself; the other columns are of the first."""
    names, out = ("rnng", "on_lstm"), texts.with_name("out.tsv")
    alone = {}
    for name in names:
        run(capsys, "surprisal", texts, "--model", models[name], "--out", out, "--overwrite")
        alone[name] = read_tsv(out)
    command = ("surprisal", texts, "--model", models["rnng"], "--model", models["on_lstm"])
    run(capsys, *command, "--out", out, "--overwrite")
    both = read_tsv(out)
    for name, rows in alone.items():
        assert [row[f"surprisal_bits_{name}"] for row in both] == [row["surprisal_bits"] for row in rows]
    assert [{key: row[key] for key in alone["rnng"][0]} for row in both] == alone["rnng"]
    (other,) = json.loads(Path(f"{out}.meta.json").read_text())["options"]["other_models"]
    assert other["architecture"] == "ONLSTMForCausalLM" and other["estimator"] == "exact"
    assert "--lmzoo has only one column of surprisals. Give one --model" in fail(capsys, *command, "--lmzoo")
    assert "--cache and --trees work with only one --model" in fail(capsys, *command, "--cache", "c")
    assert "--model rnng is given 2 times" in fail(capsys, *command, "--model", models["rnng"])
    assert "--model a is given 2 times" in fail(capsys, "surprisal", texts, "--model", "x/a/model", "--model", "b/a")


def test_surprisal_with_frequencies(models, texts, capsys):
    """As the baseline of reading times; words without a count have none."""
    counts = texts.with_name("counts.tsv")
    counts.write_text("word\tcount\nThe\t99\nstrong\t0\nsaid\t\n")
    command = ["surprisal", texts, "--model", models["gpt2"], "--device", "cpu"]
    run(capsys, *command, "--frequencies", counts, "--out", out := texts.with_name("out.tsv"))
    rows = read_tsv(out)
    assert list(rows[0]) == [*columns("bits"), "length", "log_frequency"]
    logs = {"The": math.log(100), "strong.": 0.0}
    for row in rows:
        assert float(row["log_frequency"] or "nan") == pytest.approx(logs.get(row["word"], math.nan), nan_ok=True)
    assert [row["length"] for row in rows[-5:]] == ["6", "2", "4", "2", "1"]
    assert json.loads(Path(f"{out}.meta.json").read_text())["data"]["frequencies"][0]["sha256"]
    counts.write_text("the\t99\nstrong\t0\n")  # without a header, in lower case
    run(capsys, *command, "--frequencies", counts, "--out", out, "--overwrite")
    assert [row["log_frequency"] for row in read_tsv(out)] == [row["log_frequency"] for row in rows]
    counts.write_text("word\nThe\n")
    assert "words, then counts" in fail(capsys, *command, "--frequencies", counts)
    assert "No such file" in fail(capsys, *command, "--frequencies", "missing.tsv")
    run(capsys, *command, "--frequencies", "wordfreq:en", "--out", out, "--overwrite")
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert meta["options"]["frequencies"] == "wordfreq:en" and meta["versions"]["wordfreq"] >= "3"


def test_surprisal_options(models, tmp_path):
    table = tmp_path / "items.csv"
    table.write_text("id,text,document,word\nx1,We ask,1,p\nx2,for peace,1,q\n", encoding="utf-8")
    out = tmp_path / "out.tsv"
    reading = ["--text-column", "text", "--item-column", "id"]
    common = ["surprisal", str(table), "--model", models["gpt2"], "--out", str(out), "--device", "cpu", *reading]
    assert main([*common, "--unit", "nats", "--context", "document", "--word-correction"]) == 0
    assert json.loads(Path(f"{out}.meta.json").read_text())["options"]["word_correction"] is True
    rows = read_tsv(out)
    items = [TextItem("x1", "We ask"), TextItem("x2", "for peace")]
    expected = score_words(scorer_of("gpt2"), items, context="document", word_correction=True)
    nats = [-p for found in expected for p in found.log_probs.tolist()]
    assert [float(row["surprisal_nats"]) for row in rows] == pytest.approx(nats, abs=1e-4)
    assert [row["item"] for row in rows] == ["x1", "x1", "x2", "x2"]
    assert list(rows[0])[-2:] == ["document", "word_input"] and [row["word_input"] for row in rows] == list("ppqq")
    common.append("--overwrite")
    assert main([*common, "--entropy", "shannon"]) == 0
    entropies = [found.more["entropy_{}"] for found in score_words(scorer_of("gpt2", entropy="shannon"), items)]
    bits = [float(row["entropy_bits"]) for row in read_tsv(out)]
    assert bits == pytest.approx((torch.cat(entropies) / math.log(2)).tolist(), abs=1e-4)
    assert main([*common, "--no-first-word"]) == 0
    assert [row["surprisal_bits"] == "" for row in read_tsv(out)] == [True, False, True, False]
    assert main([*common, "--lmzoo"]) == 0
    rows = read_tsv(out)
    assert list(rows[0]) == ["sentence_id", "token_id", "token", "surprisal"]
    assert "".join(row["token"] for row in rows) == "WeĠaskforĠpeace"
    assert [row["sentence_id"] for row in rows if row["token_id"] == "1"] == ["1", "2"]
    plain = score_words(scorer_of("gpt2"), items)
    total = -sum(found.log_probs.sum().item() for found in plain) / math.log(2)
    assert sum(float(row["surprisal"]) for row in rows) == pytest.approx(total, abs=1e-3)


def test_word_correction_is_recorded_only_where_it_applies(models, texts, capsys):
    out = texts.with_name("out.tsv")
    command = ["surprisal", str(texts), "--model", models["rnng"], "--estimator", "stepwise", "--out", str(out)]
    assert main(command) == 0
    plain = out.read_bytes()
    assert "--word-correction does not apply" in remarks(capsys, *command, "--word-correction", "--overwrite")
    assert out.read_bytes() == plain
    assert json.loads(Path(f"{out}.meta.json").read_text())["options"]["word_correction"] is False


REMARKS = [
    # Items with several texts, a text that is longer than the model's positions, and unknown words.
    (
        "a.csv",
        "sentence,item\nWe ask,1\nShe asks,1\nHe asks,2\n",
        "gpt2",
        "1 item with several texts.*--word-column",
        "item 112",
    ),
    # A row for each region; conditions of pairs are no regions.
    ("a.csv", "sentence,item,region\nWe ask,1,a\nso so,1,b\nHe asks,2,a\n", "gpt2", "--word-column", "item 112"),
    (
        "a.csv",
        "sentence,item,kind\nWe ask,1,a\nso so,1,b\nHe asks,2,a\n",
        "gpt2",
        "1 item with several texts",
        "item 112",
    ),
    ("a.txt", "We ask\n" + "peace and hope " * 60, "gpt2", "1 of 2 texts .* 127 positions", "word_id 12"),
    ("a.txt", "of xyzzy plugh\n", "rnng", "2 of 3 words .67%. are unknown.*--tokenize ptb", "oov 011"),
]


@pytest.mark.parametrize(("name", "content", "model", "said", "values"), REMARKS)
def test_surprisal_tells_what_to_mind(models, tmp_path, capsys, name, content, model, said, values):
    column, begin = values.split()
    (tmp_path / name).write_text(content)
    out = ("--out", tmp_path / "a.tsv", "--model", models[model], "--device", "cpu")
    told = " ".join(remarks(capsys, "surprisal", tmp_path / name, *out).split())
    assert re.search(said, told) and ("row of an item" in told) == ("--word-column" in said)
    rows = read_tsv(tmp_path / "a.tsv")
    assert len(rows) == {"item": 6, "word_id": 182, "oov": 3}[column]
    assert "".join(row[column] for row in rows[:: 2 if column == "item" else 1]).startswith(begin)


def test_surprisal_of_several_files_and_folders(models, tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.tsv").write_text("item\tsentence\tday\tfile\n7\tWe ask\t1\tmine\n", encoding="utf-8")
    (folder / "._a.txt").write_bytes(b"\xff")
    (folder / "sub.txt").mkdir()
    (folder / "a.txt").write_text("We ask\n\nfor peace\n", encoding="utf-8")
    (folder / "notes.md").write_text("not a text", encoding="utf-8")
    (tmp_path / "more.txt").write_text("peace\n", encoding="utf-8")
    rnng = ("--model", models["rnng"])
    command = ["surprisal", str(folder), str(tmp_path / "more.txt"), *rnng]
    printed = run(capsys, *command)
    rows = list(csv.DictReader(io.StringIO(printed), delimiter="\t"))
    places = [(Path(row["file"]).name, row["item"], row["sentence_id"], row["word"], row["day"]) for row in rows]
    assert places == [
        ("a.txt", "1", "1", "We", ""),
        ("a.txt", "1", "1", "ask", ""),
        ("a.txt", "3", "3", "for", ""),
        ("a.txt", "3", "3", "peace", ""),
        ("b.tsv", "7", "4", "We", "1"),
        ("b.tsv", "7", "4", "ask", "1"),
        ("more.txt", "1", "5", "peace", ""),
    ]
    assert [row["file_input"] for row in rows] == ["", "", "", "", "mine", "mine", ""]
    out = tmp_path / "all.tsv"
    assert main([*command, "--out", str(out)]) == 0 and out.read_text(encoding="utf-8") == printed
    files = json.loads(Path(f"{out}.meta.json").read_text())["data"]["files"]
    assert [Path(file["path"]).name for file in files] == ["a.txt", "b.tsv", "more.txt"]
    assert "a second" in capsys.readouterr().err
    capsys.readouterr()
    assert "1 item with several texts" in remarks(capsys, *command, "--out", out, "--overwrite")
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, message in (
        ((*command[:2], *rnng, "--out", folder / "new.tsv"), "lies in a folder whose files are read"),
        ((*command, "--lmzoo"), "--lmzoo has no column for the file"),
        ((*command[:2], folder / "a.txt", *rnng), "a.txt is named twice"),
        (("surprisal", empty, *rnng), "holds no file in .txt, .tsv, .csv, .jsonl"),
        ((*command, "--context", "document"), "choose the context 'sentence'"),
    ):
        assert message in fail(capsys, *words)


WORDS = """file\tword\tpart\titem
1\tWe\t1\tb
2\tthey\t1\ta
3\tfor peace\t1\tb
4\t\t1\ta
5\task\t1\ta
6\tWe\t2\tb
7\tagree\t2\tb
"""


@pytest.mark.parametrize(("name", "context"), [("rnng", "sentence"), ("on_lstm", "document"), ("gpt2", "document")])
def test_a_table_with_a_word_per_row_keeps_its_rows(models, tmp_path, capsys, name, context):
    """Items may be mixed, words may be empty or have white space; the numbers are those of the joined texts."""
    (tmp_path / "a.tsv").write_text(WORDS)
    command = ["surprisal", tmp_path / "a.tsv", "--model", models[name], "--word-column", "word", "--device", "cpu"]
    command += ["--sentence-column", "part", "--context", context]
    rows = list(csv.DictReader(io.StringIO(run(capsys, *command)), delimiter="\t"))
    assert [row["file"] for row in rows] == list("1234567") and [row["part"] for row in rows] == list("1111122")
    assert [row["word"] for row in rows] == ["We", "they", "for peace", "", "ask", "We", "agree"]
    assert [row["item"] for row in rows] == list("babaabb")
    assert [row["word_id"] for row in rows] == list("1122312")
    assert (rows[3]["n_tokens"], rows[3]["oov"]) == ("0", "0")
    texts = [TextItem("b", "We for peace"), TextItem("b", "We agree"), TextItem("a", "they ask", 1)]
    scores = score_words(scorer_of(name), texts, context=context)
    we, for_, peace, we2, agree, they, ask = [-p / math.log(2) for s in scores for p in s.log_probs.tolist()]
    bits = [float(row["surprisal_bits"] or "nan") for row in rows]
    assert bits == pytest.approx([we, they, for_ + peace, math.nan, ask, we2, agree], abs=1e-3, nan_ok=True)
    run(capsys, *command, "--out", tmp_path / "out.tsv")
    written = read_tsv(tmp_path / "out.tsv")
    assert [(row["file"], row["word"]) for row in written] == [(row["file"], row["word"]) for row in rows]
    (tmp_path / "b.tsv").write_text(WORDS)
    out = run(capsys, "surprisal", tmp_path / "b.tsv", *command[1:])
    rows = list(csv.DictReader(io.StringIO(out), delimiter="\t"))
    assert [Path(row["file"]).name for row in rows] == ["b.tsv"] * 7 + ["a.tsv"] * 7
    assert [row["file_input"] for row in rows] == list("1234567" * 2)


def test_texts_that_are_none_are_told(models, tmp_path, capsys):
    model = ("--model", models["gpst"], "--device", "cpu")
    for name, content, given, message in (
        ("a.tok", WORDS, [], "a.tok is read as plain text, but has 4 columns, like a table. Pass --format tsv"),
        ("a.txt", "# text = We\n1\tWe\twe\tPRON\tPRP\t_\t0\troot\t_\t_\n", [], "has ten columns, like CoNLL-U"),
        ("a.tok", WORDS, ["--word-column", "word"], "If it is a table, give its format, for example --format tsv"),
        ("b.tsv", WORDS, ["--word-column", "word", "--item-column", "x"], "row 1 has no 'x'"),
        ("b.tsv", WORDS, ["--word-column", "word", "--text-column", "x"], "a text per row (--text-column), or a word"),
        ("b.tsv", WORDS, ["--sentence-column", "part"], "a text per row (--text-column), or a word"),
        (
            "b.tsv",
            WORDS,
            [],
            "a row holds one word or region of a text, name the column of the words: synlm surprisal ",
        ),
        ("b.tsv", "word\titem\nWe\t1\nask\t\n", ["--word-column", "word"], "row 2 has an empty 'item'"),
        (
            "b.csv",
            "item,sentence\n1,We\n2,We, too\n",
            [],
            "3 fields, but the header names 2: ['item', 'sentence']. Quote",
        ),
        ("b.csv", "item,sentence\n1\n", [], "['item', 'sentence']. Write all fields of the row, also empty ones"),
        ("b.tsv", WORDS.replace("part", "subject"), ["--word-column", "word"], "the rows of 2 readers (subject)"),
        ("b.tsv", '"item"\t"sentence"\n"1"\t"a "no" b"\n', [], "Double the quotation marks inside a quoted field"),
        (
            "c.tok",
            'item,sentence\n1,We\n2,"We, too"\n',
            [],
            "begins with the names of 2 columns, like a table. Pass --format csv",
        ),
        ("c.tok", '"item";"sentence"\n1;We ask\n', [], "2 columns, like a table. Pass --format csv, or --format txt"),
    ):
        (tmp_path / name).write_text(content)
        assert message in fail(capsys, "surprisal", tmp_path / name, *model, *given)
    assert main(["surprisal", str(tmp_path / "a.txt"), *model, "--format", "txt"]) == 0
    for command in ("parse", "generate"):
        message = fail(capsys, command, tmp_path / "a.txt", *model)
        assert (
            "columns, like CoNLL-U, where lines" in message and "--input-format tsv, or --input-format txt" in message
        )
        assert main([command, str(tmp_path / "a.txt"), *model, "--input-format", "txt"]) == 0
    for content, said in (
        ("We\nask\nfor\npeace\n.\n", "5 of 5 texts have one word, .* --word-column"),
        (' "We ask"\nWe\n', "1 of 2 texts has quotation marks at both ends"),
        ("We\u200b ask\npea\u00adce\nexpose\u0301\nexpos\u00e9\n", "3 of 4 texts have invisible characters"),
        ("Well,ask\nWe ask\n", ""),
        ("(S (NP (PRP We)) (VP (VBP ask)))\n(We ask)\n", "1 of 2 texts has brackets like a tree"),
        ("\u3053\u308c\u306f\u672c\u3067\u3059\u305d\u308c\u3082\u3002\n" * 6, "have 9 characters on average: spaces"),
        ("We ask, and ask. So?\n\u6211\u4eec \u540c\u610f\n", ""),
    ):
        (tmp_path / "c.txt").write_text(content, encoding="utf-8")
        for command in (["surprisal"], ["evaluate", "perplexity"]):
            told = " ".join(remarks(capsys, *command, tmp_path / "c.txt", *model).split())
            assert re.search(said, told) and told.count("characters on average") <= 1 and "punct" not in told
    (tmp_path / "d.txt").write_text("We ask and ask So\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("We ask, and ask. \u201cSo?\u201d\n", encoding="utf-8")
    read = [
        [row.split("\t")[6] for row in run(capsys, "surprisal", tmp_path / name, *model, *more).splitlines()]
        for name, more in (("c.txt", ["--tokenize", "no-punctuation"]), ("d.txt", []))
    ]
    assert read[0] == read[1]


def test_a_row_that_repeats_the_one_before_is_told(models, tmp_path, capsys, caplog):
    (tmp_path / "a.tsv").write_text("item\tregion\ttext\n1\tnp\tWe\n1\tvp\task\n1\tvp\task\n")
    printed = run(capsys, "surprisal", tmp_path / "a.tsv", "--word-column", "text", "--model", models["gpst"])
    assert len(printed.split("\n")) == 5
    assert "row 3 repeats the row before (1 such)" in caplog.text


def test_items_that_were_pasted_twice_are_named_by_their_rows(tmp_path):
    """Of all conditions, also where they stand row by row; --sentence-column item takes them as they are."""
    rows = [f"1\t{kind}\t{n}\t{word}" for kind in "ab" for n, word in enumerate("we ask".split())]
    orders = {"4 data rows (5 to 8)": rows + rows, "4 data rows (3 to 4, 7 to 8)": rows[:2] * 2 + rows[2:] * 2}
    for said, order in orders.items():
        (tmp_path / "a.tsv").write_text("\n".join(["item\tcondition\tregion\tword", *order]))
        refused(f"{re.escape(said)} repeat earlier rows", read_items, tmp_path / "a.tsv", word_column="word")
    assert len(read_items(tmp_path / "a.tsv", word_column="word", sentence_column="item")) == 2


REGIONS = [
    ("1", "garden", "np", "We ask"),
    ("1", "garden", "pp", "for peace"),
    ("1", "control", "np", "We"),
    ("1", "control", "pp", "ask for peace"),
    ("2", "garden", "np", "peace and hope"),
    ("2", "control", "np", "peace or hope"),
    ("2", "garden", "pp", "ask"),
    ("2", "control", "pp", "ask"),
]


def lines_of(monkeypatch, capsys, table, by, x, *scores):
    """The title of the axis, and the lines, of a figure of a table."""
    drawn = Mock()
    monkeypatch.setattr("hf_synlm.cli.evaluate.plot_lines", drawn)
    run(capsys, "evaluate", "plot", table, "--by", by, "--x", x, *scores, "--out", table.with_suffix(".lines.svg"))
    return drawn.call_args.kwargs["axes_titles"][1], drawn.call_args.args[2]


def test_the_figure_of_a_table_sums_surprisal_and_averages_other_measures(tmp_path, capsys, monkeypatch):
    """Of each text, then of each item; items of two files differ; several scores are lines of their own."""
    (tmp_path / "a.tsv").write_text(
        "file\titem\tsentence_id\tcondition\tregion\tsurprisal_bits\tentropy_bits\n"
        "a\t1\t1\tx\tnp\t1\t4\na\t1\t1\tx\tnp\t2\t6\na\t1\t2\tx\tnp\t5\t1\na\t1\t2\tx\tpp\t7\t\nb\t1\t3\tx\tnp\t8\t3\n"
    )
    columns = "item sentence_id word_id surprisal_bits surprisal_bits_a surprisal_bits_b"
    (tmp_path / "b.tsv").write_text("\t".join(columns.split()) + "\n1\t1\t1\t2\t2\t3\n")
    plot = ["evaluate", "plot", str(tmp_path / "b.tsv"), "--out", str(tmp_path / "b.svg"), "--x"]
    said = "the picture shows surprisal_bits_a. --score chooses another score: surprisal_bits, surprisal_bits_a,"
    assert said in remarks(capsys, *plot, "word_id")
    assert "sum of surprisal_bits_a per word_id" in "".join(ElementTree.parse(tmp_path / "b.svg").getroot().itertext())
    assert "no column 'region'" in (message := fail(capsys, *plot, "region", "--overwrite"))
    assert "--x (word_id: the words of a sentence in order)" in message
    scores = ("--score", "surprisal_bits", "--score", "entropy_bits")
    title, lines = lines_of(monkeypatch, capsys, tmp_path / "a.tsv", "condition", "region", *scores)
    assert title == "sum of surprisal_bits per region\nmean of entropy_bits per region"
    assert lines["x, surprisal_bits"] == [(6, 2), (7, 0)]  # (3 + 5) / 2 and 8
    assert lines["x, entropy_bits"][0] == (3, 0) and math.isnan(lines["x, entropy_bits"][1][0])


@pytest.mark.parametrize("model", ["gpst", "pcfg"])
@pytest.mark.parametrize("names", [("condition", "region"), ("Ambiguity", "part")])
def test_regions_of_conditions_are_sums_of_sentences_of_their_own(models, tmp_path, capsys, monkeypatch, model, names):
    """A table of item x condition, and the figure; conditions are told by their name, or because texts are alike."""
    condition, region = names
    table = [("item", *names, "text"), *REGIONS]
    (tmp_path / "r.tsv").write_text("".join("\t".join(row) + "\n" for row in table), encoding="utf-8")
    out, picture, given = tmp_path / "out.tsv", tmp_path / "out.svg", ("--model", models[model])
    said = remarks(capsys, "surprisal", tmp_path / "r.tsv", "--word-column", "text", *given, "--out", out)
    assert "2 items with several texts, by condition" in said
    rows = read_tsv(out)
    assert [(row["item"], row[condition], row[region], row["word"]) for row in rows] == REGIONS
    scorer = scorer_of(model, details=True)
    for item, kind in dict.fromkeys(row[:2] for row in REGIONS):
        words = [word for row in REGIONS if row[:2] == (item, kind) for word in row[3].split()]
        [alone] = score_words(scorer, [TextItem("", " ".join(words))])
        bits = (-alone.log_probs / math.log(2)).tolist()
        for row in (row for row in rows if (row["item"], row[condition]) == (item, kind)):
            size = len(row["word"].split())
            assert float(row["surprisal_bits"]) == pytest.approx(sum(bits[:size]), abs=1e-3)
            bits = bits[size:]
    run(capsys, "evaluate", "plot", out, "--by", condition, "--x", region, "--out", picture)
    drawn = "".join(ElementTree.fromstring(picture.read_text(encoding="utf-8")).itertext())
    assert all(word in drawn for word in (region, "np", "pp", "garden", "control", "surprisal_bits"))
    words = [(*row[:3], word) for row in REGIONS for word in row[3].split()]
    (tmp_path / "w.tsv").write_text("".join("\t".join(row) + "\n" for row in [table[0], *words]), encoding="utf-8")
    run(capsys, "surprisal", tmp_path / "w.tsv", "--word-column", "text", *given, "--out", tmp_path / "words.tsv")
    figures = [lines_of(monkeypatch, capsys, file, condition, region) for file in (out, tmp_path / "words.tsv")]
    for line, place in ((line, place) for line in ("garden", "control") for place in (0, 1)):
        kinds = [row for row in rows if row[condition] == line and row[region] == ("np", "pp")[place]]
        one, two = (float(row["surprisal_bits"]) for row in kinds)
        for _, lines in figures:
            assert lines[line][place] == pytest.approx(((one + two) / 2, abs(one - two) / 2), abs=1e-3)
    message = fail(capsys, "evaluate", "plot", out, "--out", tmp_path / "b.svg")
    assert message.endswith("neither a second file nor --label. --by needs a table and --x")
    assert "no column 'place'" in fail(capsys, "evaluate", "plot", out, "--x", "place", "--out", tmp_path / "b.svg")
    out.with_suffix(".csv").write_bytes(out.read_bytes())
    message = fail(capsys, "evaluate", "plot", out.with_suffix(".csv"), "--x", region, "--out", tmp_path / "b.svg")
    assert "is not a table (.tsv), which --x needs. Give a table of `synlm surprisal`" in message
    (tmp_path / "words.tsv").write_text("item\tsentence_id\tplace\tb\n1\t1\t1\t2.5\n1\t1\t2\tinf\n")
    drawing = ("evaluate", "plot", tmp_path / "words.tsv", "--x", "place", "--score", "b", "--out", tmp_path / "b.svg")
    assert "row 2: 'inf' in 'b' is not a number" in fail(capsys, *drawing)
    assert math.isnan(_drawable(Path("a"), 1, "b", "")) and _drawable(Path("a"), 1, "b", "1e3") == 1000
    refused("'1_000' in 'b' is not a number", _drawable, Path("a"), 1, "b", "1_000")
    (tmp_path / "words.tsv").write_text("item\tsentence_id\tplace\tb\tc\n1\t1\t1\t1E-05\t\n1\t1\t2\t\t\n")
    assert "the column 'c' holds no number" in fail(capsys, *drawing[:-3], "c", *drawing[-2:])
    _, lines = lines_of(monkeypatch, capsys, tmp_path / "words.tsv", "item", "place", "--score", "b")
    assert lines["1"][0] == (1e-5, 0) and math.isnan(lines["1"][1][0])


def test_columns_that_change_inside_an_item_are_no_conditions(tmp_path):
    """Regions of several rows, measures of words, and sentences of a story leave an item one text."""
    words = "the old man saw the dog near the house and the dog barked at the man".split()
    rows = [f"1\t{word}\t{'abc'[k // 6]}\t{len(word)}\t{k}\t{k // 8}" for k, word in enumerate(words)]
    table = "\n".join(["item\tword\tregion\tlength\tposition\tsentence", *rows])
    (tmp_path / "a.tsv").write_text(table, encoding="utf-8")
    [item] = read_items(tmp_path / "a.tsv", word_column="word")
    assert item.text.split() == words


@pytest.mark.parametrize("place", ["", "position"])
def test_columns_in_doubt_are_refused_by_name(tmp_path, place):
    """Texts of other words, which begin a column anew, or with a capital letter; --sentence-column decides."""
    texts = [("a", "Yesterday we left"), ("b", "Nobody ever asked")]
    rows = [f"{k}\t{kind}\t{word}\t{n}" for k in (1, 2) for kind, text in texts for n, word in enumerate(text.split())]
    table = "\n".join(["item\tBedingung\tword\tposition", *rows])
    table = table if place else re.sub(r"\t[^\t]*$", "", table, flags=re.M)
    (tmp_path / "a.tsv").write_text(table, encoding="utf-8")
    said = f"'Bedingung' changes inside an item, '{place or 'word'}' begins anew, as in '1'"
    refused(said, read_items, tmp_path / "a.tsv", word_column="word")
    for column, number in (("Bedingung", 4), ("item", 2)):
        assert len(read_items(tmp_path / "a.tsv", word_column="word", sentence_column=column)) == number


@pytest.mark.parametrize("names", [["list"], ["list", "place"]])
def test_texts_that_stand_row_by_row_are_told_by_their_column(tmp_path, names):
    """Conditions take turns, unless they are known by their name; parts of speech do not."""
    texts = {"a": "yesterday we all left", "b": "nobody ever asked me"}
    rows = [(str(k), word, kind, str(n)) for k in (1, 2) for n in range(4) for kind, text in texts.items()
            for word in [text.split()[n]]]  # fmt: skip
    for column, tags in (("list", ""), ("condition", ""), ("tag", "abbabaab")):
        cells = [(*row[:2], tags[k % 8] if tags else row[2], row[3]) for k, row in enumerate(rows)]
        table = [("item", "word", column, *names[1:]), *(row[: 2 + len(names)] for row in cells)]
        (tmp_path / "a.tsv").write_text("".join("\t".join(row) + "\n" for row in table), encoding="utf-8")
        if column == "list":
            with pytest.raises(ValueError, match="where 'list' changes inside an item, .*, as in '1'"):
                read_items(tmp_path / "a.tsv", word_column="word")
            found = read_items(tmp_path / "a.tsv", word_column="word", sentence_column="list")
        elif column == "condition" or len(names) == 1:
            found = read_items(tmp_path / "a.tsv", word_column="word")
        assert [item.text for item in found] == [*texts.values()] * 2 or (column, len(found)) == ("tag", 2)


TWO_TEXTS = [("the cat", "slept"), ("a dog in town", "barked")]


WITHOUT_CONDITION = [
    ("type\tregion", "ab", "where 'type' changes inside an item, 'region' begins anew, as in '1'"),
    ("part\ttype", "ab", "where 'type' changes inside an item, 'part' begins anew, as in '1'"),
    ("region", "", "'region' begins anew inside item '1', with 'n1'. If each part .* in a column condition"),
    ("word_id", "", "'word_id' begins anew inside item '1', with 'n1'"),
]


@pytest.mark.parametrize(("header", "cells", "said"), WITHOUT_CONDITION)
def test_texts_without_a_condition_are_refused_by_the_column_that_tells_them(tmp_path, header, cells, said):
    """Regions begin anew; they never tell texts apart themselves. --sentence-column item reads an item as one text."""
    rows = []
    for item in "12":
        for kind, text in zip(cells or " ", TWO_TEXTS if cells else [TWO_TEXTS[0] + TWO_TEXTS[1]], strict=True):
            for n, words in enumerate(text):
                named = {"type": kind, "part": f"n{n}", "region": f"n{n % 2 + 1}", "word_id": f"n{n % 2 + 1}"}
                rows.append("\t".join([item, *(named[name] for name in header.split("\t")), words]))
    (tmp_path / "a.tsv").write_text("\n".join([f"item\t{header}\twords", *rows]) + "\n")
    refused(said, read_items, tmp_path / "a.tsv", word_column="words")
    names = ("type", 4) if cells else ("item", 2)
    assert len(read_items(tmp_path / "a.tsv", word_column="words", sentence_column=names[0])) == names[1]
    # A condition may have the regions in another order.
    rows = [f"1\t{region}\tword{n}" for n, region in enumerate("abcdacbd")]
    (tmp_path / "a.tsv").write_text("\n".join(["item\tregion\twords", *rows]) + "\n")
    refused("'region' begins anew inside item '1', with 'a'", read_items, tmp_path / "a.tsv", word_column="words")


def test_conditions_that_are_empty_or_misspelled_are_told(tmp_path, caplog):
    def write(change: dict[int, str]) -> Path:
        texts = list(zip("ab", TWO_TEXTS, strict=True))
        cells = [f"{item}\t{kind}\t{word}" for item in "1234" for kind, text in texts for word in text]
        for row, cell in change.items():
            cells[row] = "\t".join([cells[row][0], cell, cells[row].split("\t")[2]])
        (tmp_path / "a.tsv").write_text("\n".join(["item\tcondition\ttext", *cells]) + "\n")
        return tmp_path / "a.tsv"

    assert len(read_items(write({}), word_column="text")) == 8 and not caplog.text
    assert len(read_items(write({1: "a "}), word_column="text")) == 8 and not caplog.text
    assert len(read_items(write({1: ""}), word_column="text")) == 9
    assert "texts with an empty condition: 1 of 9, the first in data row 2. Each is" in caplog.text
    assert "1 text of 9 may have a typing error in the item, the condition" in caplog.text
    assert "The first: 1, a has 1 row, most others have 2 rows" in caplog.text
    cells = ("a\tn1\tWe", "\tn2\task", "\tn3\tall", "b\tn1\tYou", "\tn2\task", "\tn3\tall")  # merged
    (tmp_path / "a.tsv").write_text("\n1\t".join(["item\tcondition\tregion\ttext", *cells]) + "\n")
    said = r"2 data rows \(5 to 6\) repeat earlier rows of the same text. Fill in empty cells"
    refused(said, read_items, tmp_path / "a.tsv", word_column="text")
    rows = [f"{item}\tn{n}\t{word}" for item in "1234" for n, word in enumerate("We ask for peace".split())]
    rows[4:6] = rows[5:3:-1]
    (tmp_path / "a.tsv").write_text("\n".join(["item\tregion\ttext", *rows]) + "\n\t\t\n")  # an empty row
    assert len(read_items(tmp_path / "a.tsv", word_column="text")) == 4
    assert "2 has 4 rows (n1, n0, n2, n3), most others have 4 rows (n0, n1, n2, n3)" in caplog.text
    assert "several sentences" not in caplog.text
    (tmp_path / "a.tsv").write_text("item\ttext\n1\tWe\n1\task.\n1\tWe\n1\tagree.\n")
    read_items(tmp_path / "a.tsv", word_column="text")
    assert "1 of 1 text: several sentences are read as one text" in caplog.text
    (tmp_path / "a.tsv").write_text("item\tsentence\n1\tWe ask\n\tWe agree\n")
    assert [item.item for item in read_items(tmp_path / "a.tsv")] == ["1", "2"]
    assert "data row 2 has no item. The item is then the number of the row. Fill in empty" in caplog.text


def test_words_in_pieces_have_sums_and_measures_of_trees(models, tmp_path, capsys):
    """Under a PCFG, too, as for a word that --tokenize ptb splits."""
    (tmp_path / "a.txt").write_text("We ask\u2019s for peace.\nask's\n", encoding="utf-8")
    printed = run(capsys, "surprisal", tmp_path / "a.txt", "--model", models["pcfg"], "--tokenize", "ptb")
    rows = [row.split("\t") for row in printed.splitlines()[1:]]
    assert [(row[3], row[4]) for row in rows[:4]] == [("We", "1"), ("ask\u2019s", "2"), ("for", "1"), ("peace.", "1")]
    scores = score_words(scorer_of("pcfg"), [TextItem("", "We ask 's for peace")])[0].log_probs
    bits = (-scores / math.log(2)).tolist()
    expected = [bits[0], bits[1] + bits[2], *bits[3:]]
    assert [float(row[6]) for row in rows[:4]] == pytest.approx(expected, abs=1e-3)
    opened, closed = (sum(int(row[k]) for row in rows[:4]) for k in (17, 18))
    assert 1 <= opened == closed <= 3 and all(row[16] for row in rows)


def test_marks_and_control_characters_are_told(models, tmp_path, capsys):
    model = ("--model", models["gpst"])
    (tmp_path / "a.txt").write_bytes("We ask, for peace.\nAnna\u2019s peace\n".encode("cp1252"))
    message = fail(capsys, "surprisal", tmp_path / "a.txt", *model)
    assert "byte 0x92" in message and "such as --encoding cp1252 (gbk" in message
    command = ("surprisal", tmp_path / "a.txt", *model, "--encoding")
    assert "1 of 2 texts has control characters" in remarks(capsys, *command, "latin-1")
    said = remarks(capsys, *command, "cp1252", "--tokenize", "no-punctuation")
    assert "control" not in said and "1 of 2 texts has marks between words" in said and "n_tokens 0" not in said
    (tmp_path / "b.txt").write_text("We ask , for peace .\n", encoding="utf-8")
    said = remarks(capsys, "surprisal", tmp_path / "b.txt", *model, "--tokenize", "no-punctuation")
    assert "no token (n_tokens 0) and no surprisal: 2 of 6 words" in said
    (tmp_path / "b.tsv").write_text("item\tword\n1\tWe\n1\t\n1\task\n", encoding="utf-8")
    given = ("surprisal", tmp_path / "b.tsv", *model, "--word-column", "word")
    assert "n_tokens 0" not in remarks(capsys, *given)


def test_long_files_are_read_piece_by_piece(models, tmp_path, capsys, monkeypatch):
    """What is printed and written is as if they were read at once."""
    lines = [" ".join(["We ask for peace"] * (k % 3)) for k in range(70)]
    (tmp_path / "counts.tsv").write_text("We\t5\nask\t3\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    rows = [f"x{k}\t{line}\t{k}" for k, line in enumerate(lines)]
    (tmp_path / "a.tsv").write_text("\n".join(["item\tsentence\tday", *rows]), encoding="utf-8")
    objects = [json.dumps({"sentence": line, **({"day": k} if k > 60 else {})}) for k, line in enumerate(lines)]
    (tmp_path / "b.jsonl").write_text("\n".join(objects), encoding="utf-8")
    words = [f"{k}\t{kind}\t{word}\n" for k in range(9) for kind in "ab" for word in "We ask peace".split()]
    (tmp_path / "w.tsv").write_text("item\tkind\tword\n" + "".join(words), encoding="utf-8")
    trees = [f"(S {' '.join(f'(NP {word})' for word in line.split())})" if line else "" for line in lines]
    (tmp_path / "a.mrg").write_text("\n".join(trees), encoding="utf-8")
    out, given = ("--out", tmp_path / "out", "--overwrite"), ("--unknown-labels", "drop", "--trees", tmp_path / "a.mrg")
    for model, command, name, *more in (
        ("on_lstm", "surprisal", "a.txt"),
        ("gpt2", "surprisal", "a.tsv", *out),
        ("gpst", "surprisal", "a.txt", "--num-beams", 2, "--num-beams", 4, *out),
        ("gpst", "surprisal", "a.txt", "--model", models["on_lstm"], "--frequencies", tmp_path / "counts.tsv"),
        ("on_lstm", "surprisal", "a.txt", "--context", "document", *out),
        ("gpt2", "surprisal", "a.txt", "--context", "document"),
        ("gpst", "surprisal", "a.tsv", "--context", "document"),
        ("on_lstm", "surprisal", "w.tsv", "--word-column", "word"),
        ("rnng", "surprisal", "a.txt", *given),
        ("on_lstm", "parse", "a.txt"),
        ("gpst", "parse", "a.tsv", "--format", "json", "--num-trees", 2),
        ("gpst", "parse", "a.txt", "--format", "html"),
        ("gpst", "parse", "a.txt", "--format", "text", *out),
    ):
        printed = []
        for first in (4, 4096):
            monkeypatch.setattr(text_items, "NUM_FIRST", first)
            monkeypatch.setattr(text_items, "_NUM_ROWS", first)
            printed.append(run(capsys, command, tmp_path / name, "--model", models[model], *more))
            printed[-1] = printed[-1] or next(file for file in more if isinstance(file, Path)).read_text("utf-8")
        numbers = [re.findall(r"-?\d+\.\d+(?:e-\d+)?", text) for text in printed]
        texts = [re.sub(r"-?\d+\.\d+(?:e-\d+)?", "", text) for text in printed]
        assert texts[0] == texts[1] and len(texts[0]) > 900, (model, command, name)
        values = [list(map(float, found)) for found in numbers]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    monkeypatch.setattr(text_items, "NUM_FIRST", 4)
    monkeypatch.setattr(text_items, "_NUM_ROWS", 4)
    pictures = tmp_path / "pictures"
    run(capsys, "parse", tmp_path / "a.txt", "--model", models["gpst"], "--format", "svg", "--out", pictures)
    assert [path.name for path in sorted(pictures.iterdir())][:3] == ["0000002.svg", "0000003.svg", "0000005.svg"]
    (tmp_path / "a.mrg").write_text("\n".join(reversed(trees)), encoding="utf-8")
    message = fail(capsys, "surprisal", tmp_path / "a.txt", "--model", models["rnng"], *given)
    assert "The tree for sentence 2 ('We ask for peace') is not at its place" in message
    (tmp_path / "w.tsv").write_text("item\tword\n" + "1\tWe\n2\task\n" * 5, encoding="utf-8")
    message = fail(capsys, "surprisal", tmp_path / "w.tsv", "--model", models["gpt2"], "--word-column", "word")
    assert "row 5: item '1' has rows elsewhere" in message
    command = ["surprisal", tmp_path / "b.jsonl", "--model", models["gpt2"], "--out", tmp_path / "c.tsv"]
    assert "column 'day' is left out: 9 of 70 texts have it, but not the first" in remarks(capsys, *command)
    assert "day" not in read_tsv(tmp_path / "c.tsv")[0]


def test_compressed_files_and_other_encodings(models, tmp_path, capsys):
    """The results are those of the files as UTF-8, by whichever command reads them."""
    model, trees = ("--model", models["rnng"]), "(ROOT (S (NP (NN caf\u00e9)) (VP (VB ask)) (. .)))\n"
    contents = {"a.txt": "We ask for caf\u00e9\n", "a.tsv": "item\tsentence\nx\tWe ask caf\u00e9\n", "a.mrg": trees}
    contents |= {"p.csv": "sentence_good,sentence_bad\nWe ask caf\u00e9,We asks caf\u00e9\n"}
    packings = {"a.txt": (gzip.open, ".gz"), "a.tsv": (bz2.open, ".bz2"), "a.mrg": (lzma.open, ".xz")}
    commands = [["surprisal", "a.txt"], ["surprisal", "a.tsv"], ["parse", "a.txt"], ["evaluate", "pairs", "p.csv"]]
    commands += [["evaluate", "perplexity", "a.txt"], ["evaluate", "parsing", "--treebank", "a.mrg"]]
    outputs, files = [], {}
    for folder, encoding in ((tmp_path / "plain", "utf-8"), (tmp_path / "packed", "latin-1")):
        folder.mkdir()
        for name, text in contents.items():
            opened, ending = (open, "") if encoding == "utf-8" else packings.get(name, (gzip.open, ".gz"))
            files[name] = folder / f"{name}{ending}"
            with opened(files[name], "wb") as file:
                file.write(text.encode(encoding))
        given = [[files.get(word, word) for word in words] for words in commands]
        outputs.append([run(capsys, *words, *model, "--encoding", encoding) for words in given])
        run(capsys, "treebank", files["a.mrg"], "--encoding", encoding, "--out", folder / "out.mrg")
        outputs[-1].append((folder / "out.mrg").read_text(encoding="utf-8"))
    assert outputs[0] == outputs[1] and "caf\u00e9" in outputs[0][-1]
    out = ("--out", tmp_path / "x")
    for command, name, more in (("surprisal", "a.txt", model), ("parse", "a.txt", model), ("treebank", "a.mrg", out)):
        message = fail(capsys, command, files[name], *more)
        assert "is not utf-8 (invalid continuation byte): name the encoding of the file" in message
    assert "--encoding nope is unknown" in fail(capsys, "parse", files["a.txt"], *model, "--encoding", "nope")


def test_nobody_reads_the_rest(models, tmp_path):
    """`synlm surprisal ... | head -1` ends quietly."""
    (tmp_path / "a.txt").write_text("We ask\n" * 3000, encoding="utf-8")
    code = "import os, subprocess as s, sys, synlm; os.dup2(s.Popen(['head', '-1'], stdin=s.PIPE).stdin.fileno(), 1)"
    command = [sys.executable, "-c", f"{code}; sys.exit(synlm.main())", "surprisal", "a.txt"]
    done = warm_python.run([*command, "--model", models["on_lstm"]], cwd=tmp_path)
    assert done.stdout.startswith("item\t") and "roken" not in done.stderr and "Traceback" not in done.stderr


def test_ordinary_prose_is_read_as_the_treebank_writes_it(models, tmp_path, capsys):
    path = tmp_path / "texts.txt"
    path.write_text("We for (the) “Union;” America!\n", encoding="utf-8")
    command = ["surprisal", str(path), "--model", models["rnng"], "--tokenize", "ptb"]
    said, rows = remarks(capsys, *command, "--out", tmp_path / "a.tsv"), read_tsv(tmp_path / "a.tsv")
    assert [row["word"] for row in rows] == "We for (the) “Union;” America!".split()
    assert [row["oov"] for row in rows] == ["0"] * 5 and "unknown" not in said
    tree = run(capsys, "parse", *command[1:])
    assert tree.replace("(", " ").replace(")", " ").split()[-2:] == ["Union", "America"]
    # Evaluations read the same: a final word with its punctuation is not an unknown word.
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("sentence_good\tsentence_bad\nWe for America!\tWe for Union!\n", encoding="utf-8")
    for name, given in (("perplexity", path), ("pairs", pairs)):
        unknown = []
        for more in ([], ["--tokenize", "ptb"]):
            out = tmp_path / f"{name}{len(more)}.json"
            assert main(["evaluate", name, str(given), "--model", models["rnng"], *more, "--out", str(out)]) == 0
            result = json.loads(out.read_text(encoding="utf-8"))
            assert result["options"]["tokenize"] == ("ptb" if more else "words")
            numbers = {**result["scores"], **result["tables"].get("Groups", [{}])[0]}
            unknown.append(numbers.get("pairs_with_unknown_words", numbers.get("unknown_words")))
        assert unknown[0] > unknown[1] == 0
    proposals = ["--proposals", str(tmp_path / "trees"), "--tokenize", "ptb"]
    (tmp_path / "trees").write_text("(S (X We) (X for))\n")
    capsys.readouterr()
    perplexity = ("evaluate", "perplexity", path, "--model", models["rnng"], *proposals)
    assert "the words of --proposals come from the trees" in fail(capsys, *perplexity)


# ------------------------------------------------------------------------------------------------------ evaluate
def test_evaluate_syntaxgym_with_items(models, tmp_path, capsys):
    suites = tmp_path / "suites"
    suites.mkdir()
    (suites / "own_agreement.json").write_text(json.dumps(suite_data()), encoding="utf-8")
    out, items = tmp_path / "sg.json", tmp_path / "items.tsv"
    command = ["evaluate", "syntaxgym", str(suites), "--model", models["gpt2"], "--device", "cpu"]
    command += ["--suite", "own_agreement", "--items-out", str(items)]
    assert main([*command, "--out", str(out)]) == 0
    (expected,) = score_regions(scorer_of("gpt2"), [load_suite(suites / "own_agreement.json")])
    rows = read_tsv(items)
    assert list(rows[0]) == "suite item condition region region_name content surprisal_bits oov".split()
    assert len(rows) == 3 * 2 * 4 and (rows[6]["region_name"], rows[6]["content"]) == ("verb", "is")
    for row in rows:
        value = surprisals_of(expected[int(row["item"]) - 1])[row["condition"], int(row["region"])]
        assert float(row["surprisal_bits"]) == pytest.approx(value, abs=1e-4)
    assert "items.tsv exists" in fail(capsys, *command)
    assert "suite own_agreement" in json.loads(out.read_text())["scores"]


def test_ties_of_pairs(models, tmp_path, capsys):
    """Two of four pairs differ in unknown words only."""
    rows = ["We for\tWe xyzzy", "We qqq\tWe xyzzy", "qqq\txyzzy", "We\tfor peace and hope"]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("\n".join(["sentence_good\tsentence_bad", *rows]), encoding="utf-8")
    out, items = tmp_path / "out.json", tmp_path / "items.jsonl"
    model = ("--model", models["on_lstm"])
    run(capsys, "evaluate", "pairs", pairs, *model, "--out", out, "--items-out", items)
    scores = json.loads(out.read_text(encoding="utf-8"))["scores"]
    found = [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines()]
    assert [row["sentence_good"] for row in found] == ["We for", "We qqq", "qqq", "We"]
    assert scores["ties"] == 2 and scores["accuracy"] == sum(row["correct"] for row in found) / 4
    assert scores["accuracy_ties_right"] == scores["accuracy"] + 0.5
    pairs.write_text("sentence_good\tsentence_bad\nWe ask\tWe  ask\n", encoding="utf-8")
    assert "row 1 has the same sentence twice" in fail(capsys, "evaluate", "pairs", pairs, *model)


def test_evaluate_pairs_with_items(models, tmp_path):
    pairs, items, out = (tmp_path / name for name in ("pairs.tsv", "items.tsv", "pairs.json"))
    pairs.write_text(
        "sentence_good\tsentence_bad\tkind\tlist\nWe ask\tWe asks\ta\tx\nShe is\tShe are\tb\ty\n", encoding="utf-8"
    )
    command = ["evaluate", "pairs", str(pairs), "--model", models["gpt2"], "--device", "cpu", "--end-of-sentence"]
    command += ["--out", str(out)]
    assert main([*command, "--group-column", "kind", "--items-out", str(items)]) == 0
    expected = evaluate_pairs(scorer_of("gpt2"), read_pairs(pairs, group_column="kind"), end=True)
    rows, found = read_tsv(items), json.loads(out.read_text())
    assert [(row["pair"], row["group"], row["sentence_bad"], row["list"]) for row in rows] == [
        ("1", "a", "We asks", "x"), ("2", "b", "She are", "y"),
    ]  # fmt: skip
    for row, item in zip(rows, expected.items, strict=True):
        assert float(row["logprob_good_nats"]) == pytest.approx(item["logprob_good_nats"], abs=1e-4)
        assert row["correct"] == str(int(item["logprob_good_nats"] > item["logprob_bad_nats"]))
    assert found["scores"] == pytest.approx(expected.scores)
    assert found["options"]["end_of_text"] == "end token" and found["options"]["pairs_per_group"] == "all"
    unfinished = tmp_path / "unfinished.tsv"
    unfinished.write_text("sentence_good\tsentence_bad\nWe ask for peace\tWe ask for\n", encoding="utf-8")
    rnng = ["evaluate", "pairs", str(unfinished), "--model", models["rnng"], "--items-out", str(items), "--overwrite"]
    values = []
    for more in ([], ["--end-of-sentence"], ["--normalization", "train"], ["--normalization", "search"]):
        assert main([*rnng, *more]) == 0
        values += [float(row["logprob_good_nats"]) for row in read_tsv(items)]
    assert values[0] == values[3] > values[1] + 0.01 and values[2] < values[0] - 0.01
    assert main([*command, "--limit", "1", "--overwrite"]) == 0
    found = json.loads(out.read_text())
    assert found["data"]["pairs"] == found["options"]["pairs_per_group"] == 1


@pytest.fixture(scope="module")
def blimp_runs(models, tmp_path_factory):
    """Results of two seeds of BLiMP, and one of a single file."""
    folder = tmp_path_factory.mktemp("blimp_runs")
    write_blimp(folder / "data")
    command = ["evaluate", "blimp", "--model", models["gpt2"], "--device", "cpu"]
    runs = [str(folder / f"run{seed}.json") for seed in (0, 1)]
    for seed, out in enumerate(runs):
        two = [str(folder / "data"), "--limit", "2", "--paradigm", "agreement_1", "--seed", str(seed)]
        assert main([*command, *two, "--out", out]) == 0
        assert json.loads(Path(out).read_text())["data"]["pairs"] == 2
    other = str(folder / "other.json")
    assert main([*command, str(folder / "data" / "agreement_1.jsonl"), "--out", other]) == 0
    assert json.loads(Path(other).read_text())["options"]["paradigms"] == 1
    return runs, other


def test_summary_of_seeds(blimp_runs, tmp_path, capsys):
    runs, other = blimp_runs
    run(capsys, "evaluate", "summary", *runs, "--out", tmp_path / "summary.json")
    assert "| accuracy |" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [one["seed"] for one in summary["runs"]] == [0, 1] and summary["scores"][0]["runs"] == 2
    assert summary["options"]["pairs_per_paradigm"] == 2 and "seed" not in summary["options"]
    assert "different" in fail(capsys, "evaluate", "summary", runs[0], other)


def test_plot_of_seeds(blimp_runs, tmp_path, capsys):
    runs, other = blimp_runs
    picture, labels = tmp_path / "blimp.svg", ("--label", "GPT-2", "--label", "GPT-2")
    run(capsys, "evaluate", "plot", *runs, *labels, "--out", picture)
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert all(words in drawn for words in ("blimp: GPT-2 (2 runs)", "mean_over_groups", "accuracy", "chance"))
    for given in ([*runs, "--label", "GPT-2"], [runs[0], other], [*runs, "--out", picture.with_suffix(".gif")]):
        fail(capsys, "evaluate", "plot", "--out", picture, "--overwrite", *given)


def test_a_run_counts_once(blimp_runs, tmp_path, capsys):
    """A file counts once, by whatever name; and only labels make runs of one model."""
    run, picture = blimp_runs[0][0], tmp_path / "blimp.svg"
    plot = ["evaluate", "plot", "--out", str(picture), "--overwrite"]
    again = tmp_path / "again.json"
    again.symlink_to(run)
    for twice in ([run, run], [run, str(again)]):
        for command in (["evaluate", "summary"], plot):
            assert "given more than once" in fail(capsys, *command, *twice)
    copies = [str(tmp_path / place) for place in ("one/a.json", "two/a.json", "two/b.json")]
    for copy in copies:
        Path(copy).parent.mkdir(exist_ok=True)
        shutil.copy(run, copy)
    for chosen, names in ((copies[:2], "blimp: one, two"), (copies[::2], "blimp: a, b")):
        assert main([*plot, *chosen]) == 0
        assert names in "".join(ElementTree.parse(picture).getroot().itertext())
    capsys.readouterr()
    assert "--label" in fail(capsys, *plot, *copies)


# -------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["surprisal", "missing.txt"], "missing.txt: No such file or directory"),
        (["surprisal", "texts.txt", "--model", "missing"], "missing"),
        (["surprisal", "texts.txt", "--num-beams", "3"], "num_beams (--num-beams): not an option of GPT2LMHeadModel"),
        (["surprisal", "texts.txt", "--num-beams", "3", "--num-beams", "1"], "GPT2LMHeadModel"),
        (["evaluate", "blimp", "."], "holds no paradigms"),
        (["evaluate", "blimp", "nowhere"], "'nowhere' does not exist"),
        (["evaluate", "perplexity", "."], ".: Is a directory"),
        (["evaluate", "perplexity", "texts.txt", "--punctuation", "remove"], "belongs to --format treebank"),
        (["evaluate", "summary", "missing.json"], "'missing.json' does not exist"),
        (["evaluate", "pairs", "texts.txt"], "Save the pairs in one of these"),
        (["surprisal", "texts.txt", "--lmzoo", "--unit", "nats"], "--unit: --lmzoo has four columns, in bits"),
        (["surprisal", "texts.txt", "--out", "."], ". is a folder or a device"),
        (["surprisal", "texts.txt", "--out", "./texts.txt", "--overwrite"], "would overwrite an input"),
        (["surprisal", "texts.txt", "--out", "old.tsv"], "old.tsv exists. Choose another name, or pass --overwrite"),
        (["surprisal", "texts.txt", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["evaluate", "perplexity", "texts.txt", "--out", "a.md"], "Choose a name that ends in .json"),
        (["evaluate", "perplexity", "texts.txt", "--out", "old.json"], "old.md exists"),
        (["surprisal", "texts.txt", "--out", "a.csv"], "Choose a name that ends in .tsv"),
        (["parse", "texts.txt", "--out", "-"], "`--out -` is not supported"),
        (["parse", "texts.txt", "--out", "old.tsv"], "old.tsv exists"),
        (["evaluate", "perplexity", "texts.txt", "--out", "texts.txt/a.json"], "no files can be made in"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(models, texts, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(texts.parent)
    for name in ("old.tsv", "old.md"):
        Path(name).touch()
    out = ["--out", "out.tsv"] if arguments[0] == "surprisal" and "--out" not in arguments else []
    if "--out" in arguments:  # such a mistake costs no time: it shows before the model is loaded
        monkeypatch.setattr("hf_synlm.evaluation.text.scoring.TextScorer", None)
    model = [] if "--model" in arguments or "summary" in arguments else ["--model", models["gpt2"]]
    device = [] if "--device" in arguments or "summary" in arguments else ["--device", "cpu"]
    assert message in fail(capsys, *arguments, *model, *out, *device)
    assert not Path("out.tsv").exists() and not Path("out.tsv.meta.json").exists()


def test_inputs_are_never_overwritten(texts, tmp_path, capsys):
    def outcome(*arguments: str | Path) -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        message = fail(capsys, *arguments, "--overwrite")
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return message

    model, refused = ("--model", "missing/model/here"), "would overwrite an input"
    notes = texts.rename(tmp_path / "notes.md")
    assert refused in outcome("evaluate", "perplexity", notes, *model, "--out", tmp_path / "notes.json")
    meta = notes.rename(tmp_path / "out.tsv.meta.json")
    (link := tmp_path / "link.tsv").symlink_to(meta)
    for out in (tmp_path / "out.tsv", link):
        assert refused in outcome("surprisal", meta, *model, "--format", "txt", "--out", out)
    # Nor what makes up a model, nor the folder that holds an input.
    (folder := tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "gpst_chart.py"):
        (folder / name).write_text("{}")
        assert refused in outcome("generate", "--prompt", "We", "--model", folder, "--out", folder / name)
    (tokenizer := tmp_path / "tokenizer" / "inner").mkdir(parents=True)
    convert = ("convert", "rnng", "--weights", folder / "model.safetensors", "--config", folder / "config.json")
    for out in (tokenizer, tokenizer.parent, folder):
        assert refused in outcome(*convert, "--tokenizer", tokenizer, "--out", out)
    assert refused in outcome("export", folder, "--out", folder)
    (other := tmp_path / "other").mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert "is not the folder of a model" in outcome(*convert, "--out", other)
    assert refused not in outcome("generate", "--prompt", "We", "--model", folder, "--out", folder / "texts.txt")
    # Nor one output by another.
    report = ("--out", tmp_path / "r.json")
    pairs = (tmp_path / "pairs.tsv").resolve()
    pairs.write_text("good\tbad\nwe agree\twe agrees\n")
    assert refused in outcome("evaluate", "pairs", pairs, *model, *report, "--items-out", tmp_path / "r.md")
    trees = ("evaluate", "parsing", "--treebank", sample_path("trees.test.txt"), *model, *report)
    assert refused in outcome(*trees, "--save-trees", tmp_path / "r.md")
    # A table may lie beside a text of the same name.
    notes = meta.rename(tmp_path / "out.json.md")
    assert "no folder 'missing" in outcome("surprisal", notes, *model, "--out", tmp_path / "out.json.tsv")
    (suites := tmp_path / "suites").mkdir()
    (suites / "number.json").write_text(json.dumps(suite_data()))
    (linked := tmp_path / "linked").mkdir()
    (linked / "number.json").symlink_to(suites / "number.json")
    assert refused in outcome("evaluate", "syntaxgym", linked, *model, "--out", suites / "number.json")
    assert "no folder 'missing" in outcome("evaluate", "syntaxgym", suites, *model, "--out", tmp_path / "new.json")


def test_devices_are_refused_and_links_stay(models, texts, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "pipe.json")
    ends = os.pipe()  # without a name in the file system, as /dev/stdout may be
    for name in (tmp_path / "pipe.json", tmp_path / "link.json", f"/proc/self/fd/{ends[1]}"):
        message = fail(capsys, "generate", "--model", models["gpt2"], "--out", name, "--overwrite")
        assert "is a folder or a device" in message
    assert stat.S_ISFIFO((tmp_path / "pipe.json").lstat().st_mode)
    (tmp_path / "pictures").mkdir()
    os.mkfifo(tmp_path / "pictures" / "1.svg")
    (tmp_path / "trees.txt").write_text("(a b)\n(c d)\n")
    draw = ("draw", tmp_path / "trees.txt", "--format", "svg", "--overwrite", "--out", tmp_path / "pictures")
    assert "is a folder or a device" in fail(capsys, *draw)
    target = tmp_path / "results" / "ppl.json"
    (tmp_path / "new.json").symlink_to(target)  # to a file and a folder that are not there yet
    score = ("evaluate", "perplexity", texts, "--model", models["gpt2"], "--device", "cpu", "--out")
    for overwrite in ((), ("--overwrite",)):
        run(capsys, *score, tmp_path / "new.json", *overwrite)
        assert (tmp_path / "new.json").is_symlink() and "word_perplexity" in target.read_text(encoding="utf-8")


def test_texts_are_opened_once(models, texts, tmp_path, capsys):
    """So they may come from pipes; their checksums are those of files."""
    model, out = ("--model", models["gpt2"]), tmp_path / "out.tsv"
    printed = run(capsys, "surprisal", texts, *model)
    os.mkfifo(pipe := tmp_path / "pipe.txt")
    threading.Thread(target=lambda: pipe.write_bytes(texts.read_bytes()), daemon=True).start()
    run(capsys, "surprisal", pipe, *model, "--out", out)
    [facts] = json.loads(Path(f"{out}.meta.json").read_text())["data"]["files"]
    assert out.read_text(encoding="utf-8") == printed and {"path": str(pipe), **facts} == facts
    assert [{**facts, "path": str(texts)}] == describe_files([texts])


def test_a_pipe_is_refused_before_it_is_read(models, texts, tmp_path, capsys):
    """Its checksum is stated, and it can be read only once; nobody writes into this one."""
    os.mkfifo(pipe := tmp_path / "pipe.txt")
    model, out = ("--model", models["gpt2"]), ("--out", tmp_path / "out.tsv")
    for command in (
        ("treebank", pipe, *out),
        ("silver", pipe, "--parser", models["gpt2"], *out),
        ("evaluate", "pairs", pipe, *model),
        ("evaluate", "perplexity", texts, "--proposals", pipe, *model),
        ("evaluate", "parsing", "--treebank", pipe, *model),
        ("evaluate", "compare", texts, pipe, "--treebank", texts),
    ):
        assert "is a pipe" in fail(capsys, *command)
    assert {path.name for path in tmp_path.iterdir()} == {"pipe.txt", texts.name}


def test_a_lack_of_memory_is_one_line_and_other_mistakes_keep_their_traceback(models, texts, monkeypatch, capsys):
    command = ["evaluate", "perplexity", str(texts), "--model", models["gpt2"]]
    monkeypatch.setattr("hf_synlm.evaluation.text.perplexity.evaluate_perplexity", measure := Mock())
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        measure.side_effect = error
        assert "out of memory: lower the batch size" in fail(capsys, *command)
    measure.side_effect = RuntimeError("shapes")
    raised(RuntimeError, "shapes", main, command)


def all_commands(command, words=()):
    """Every command and every group of commands, with its words; programs of training have a parser of their own."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if words != ("train",):
            yield from all_commands(inner, (*words, name))


@pytest.mark.parametrize(("words", "command"), list(all_commands(typer.main.get_command(app))))
def test_help(monkeypatch, capsys, words, command):
    """Every option in full, then examples, in a narrow terminal; groups list their commands."""
    monkeypatch.setenv("COLUMNS", "60")
    text = run(capsys, *words, "--help")
    flat, name = " ".join(text.split()), " ".join(("synlm", *words))
    assert f"Usage: {name} " in flat and "Args:" not in text
    commands = getattr(command, "commands", {})
    assert all(f"\n  {inner} " in text for inner in commands)
    options = {max(part.opts, key=len) for part in command.params if part.param_type_name == "option"}
    assert options <= set(re.findall("--[a-z-]+", text))
    if not commands:
        assert f"{name} " in flat.partition("Examples:")[2]
        assert flat.index("Options") < flat.index("Examples:") < flat.index("Exit codes: 0 done; 1 a check failed; 2")
    if words == ("surprisal",):
        headings = re.findall(r"^(\w.*):$", text, re.M)
        assert headings == ["Arguments", "Options", "Model", "Computation", "Estimator and beam", "Given trees"]
    if not words:
        assert run(capsys, "--version").strip() == f"hf_synlm {__version__}"


def test_the_script_loads_models_and_prints_results_alone(tmp_path):
    (tmp_path / "texts.txt").write_text("the people agree")
    command = [sys.executable, "-c", "import sys, synlm; sys.exit(synlm.main())", "surprisal"]
    command += [str(tmp_path / "texts.txt"), "--model", str(ROOT / "model_cards" / "gpst-tiny")]
    run = warm_python.run(command, cwd=ROOT)
    assert [line.split("\t")[3] for line in run.stdout.splitlines()] == ["word", "the", "people", "agree"]
    said = f"{command[-1]}: text is read by --tokenize no-punctuation, as the configuration of the model says"
    assert (run.returncode, run.stderr) == (0, f"{said} (text_style no-punctuation)\n"), "other libraries are quiet"


def test_the_script_is_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, name = scripts["project"]["scripts"]["synlm"].split(":")
    assert getattr(importlib.import_module(module), name) is main
