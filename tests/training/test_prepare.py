"""Prepared corpora: sources, shards, contexts, and what happens to damaged text, damaged shards and killed runs."""

import csv
import gzip
import io
import json
import multiprocessing
import pickle
import resource
import shutil
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, load_from_disk
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_synlm.data import encoding, files, shards, sources
from hf_synlm.data.collate import word_ends_from_word_ids
from hf_synlm.data.contexts import ContextDataset, pack_sentences
from hf_synlm.data.samples import sample_path
from hf_synlm.data.shards import PreparedCorpus
from hf_synlm.data.sources import TextFiles
from hf_synlm.data.tokenizers import load_tokenizer, train_bpe_tokenizer, train_wordpiece_tokenizer
from hf_synlm.training.arguments.base import parse_arguments, read_mapping
from hf_synlm.training.arguments.contexts import DataArguments, EvaluationArguments
from hf_synlm.training.arguments.finetuning import InductionArguments
from hf_synlm.training.arguments.sentences import SentenceFileArguments
from hf_synlm.training.programs.prepare_text import CorpusArguments, PrepareArguments, PreparedText, main, prepare
from hf_synlm.training.programs.pretrain_gpst import GPSTRecipe
from tests.helpers.refusals import raised, refused
from tests.helpers.training_runs import start_server
from tests.reference.contexts import pack_contexts

TEXT = sample_path("raw.train.txt").read_text(encoding="utf-8")
SHORT = "\n\n".join(TEXT.split("\n\n")[:3])
END = 9  # id of the end token in tests of packing


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level tokenizer of 400 pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe_tokenizer(TEXT.splitlines()[:300], 400).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of more than 65,536 words, and a quick one."""
    words = dict.fromkeys([*(f"w{k}" for k in range(1 << 16)), *TEXT.split()])
    backend = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1").save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few paragraphs, so that small texts have many."""
    monkeypatch.setattr(sources, "BLOCK_CHARACTERS", 3000)
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 40_000)


def same_text(path: str, tokenizer_name: str, **options) -> CorpusArguments:
    """Arguments for one file as training and validation text."""
    return CorpusArguments(train_files=[path], validation_files=[path], tokenizer_name=tokenizer_name, **options)


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def sentences_of(corpus: PreparedCorpus) -> list[list[list[int]]]:
    """Documents of sentences of token ids, read back shard by shard."""
    documents: list[list[list[int]]] = [[]]
    for number in range(len(corpus.records)):
        shard = corpus.shard(number)
        starts = np.concatenate([[0], shard.sentence_ends[:-1]]) if len(shard.sentence_ends) else []
        ends = Counter(shard.document_ends.tolist())
        documents += [[]] * ends[0]
        for index, (start, stop) in enumerate(zip(starts, shard.sentence_ends, strict=True)):
            documents[-1] = [*documents[-1], shard.input_ids[int(start) : int(stop)].tolist()]
            documents += [[]] * ends[index + 1]
    assert documents.pop() == []
    return documents


def decoded(text: PreparedText) -> list[list[str]]:
    """Documents of sentences of the training text as strings."""
    return [[text.tokenizer.decode(ids).removeprefix(" ") for ids in document] for document in sentences_of(text.train)]


def files_in(folder: Path) -> dict[str, bytes]:
    """Content of all files but locks, which are empty."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def corpus_of(folder: Path, shards_of_blocks: list[list[dict]]) -> PreparedCorpus:
    """Write encoded blocks, shard by shard."""
    files.write_json(folder / shards.MADE_FROM_FILE, {"format": shards.FORMAT, "sources": []})
    records: list[shards.ShardRecord] = []
    for number, blocks in enumerate(shards_of_blocks):
        path = shards.shard_path(folder, number)
        rows = Dataset.from_list(blocks, features=encoding.encoded_features(1000))
        shards.write_shard(path, rows, Counter(), bool(records) and records[-1].ends_inside_document)
        records.append(shards.ShardRecord(**json.loads((path / shards.RECORD_FILE).read_text())))
    shards.write_index(folder, records)
    return PreparedCorpus(folder)


def encoded(documents: list[list[list[int]]], is_open: bool = False) -> dict:
    """Encoded block of documents; with `is_open` the last one goes on in the next block. Odd ids end words."""
    tokens = [i for document in documents for ids in document for i in ids]
    lengths = [length for document in documents for length in (*map(len, document), 0)]
    lengths = lengths[:-1] if is_open else lengths
    return {"input_ids": tokens, "lengths": lengths, "word_ends": [i % 2 == 1 for i in tokens], "dropped": 0}


# Whole preparations


def test_embedded_corpus(tmp_path, small_blocks):
    text = prepare(CorpusArguments(tokenizer_vocab_size=500, train_files=["embedded"]), tmp_path)
    documents = [part for part in TEXT.split("\n\n") if part.strip()]
    assert (text.train.num_documents, text.train.num_sentences) == (10, 3361) == (len(documents), 3361)
    assert len(text.train.records) > 2 and text.train.counts == {}
    lines = [[line.strip() for line in document.splitlines() if line.strip()] for document in documents]
    expected = [text.tokenizer(sentences, add_special_tokens=False)["input_ids"] for sentences in lines]
    assert sentences_of(text.train) == expected
    assert text.train.num_tokens == sum(len(ids) for document in expected for ids in document)
    assert text.validation.num_documents == 1
    first = text.train.shard(0)
    words = text.tokenizer(TEXT.splitlines()[:50], add_special_tokens=False)
    ends = [end for k in range(50) for end in word_ends_from_word_ids(words.word_ids(k))]
    assert first.word_ends(0, len(ends)).tolist() == ends
    assert first.word_ends(13, 40).tolist() == ends[13:40]
    assert first.input_ids.dtype == np.uint16 and not first.input_ids.flags.owndata
    row = load_from_disk(tmp_path / "train" / "shard_00000")[0]
    assert row["input_ids"] == first.input_ids.tolist() and row["word_ends"][: len(ends)] == ends


def test_second_run_changes_nothing(tmp_path, tokenizer_folder):
    arguments = CorpusArguments(tokenizer_name=tokenizer_folder)
    first = prepare(arguments, tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}
    second = prepare(replace(arguments, preprocessing_num_workers=2), tmp_path / "out", verify=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")} == times
    assert first.train.fingerprint() == second.train.fingerprint() != second.validation.fingerprint()
    assert main(["--output-dir", str(tmp_path / "out"), "--verify"]) == 0  # without text: taken as it is
    config = write(tmp_path / "config.yaml", f"tokenizer_name: {tokenizer_folder}\nlearning_rate: 1.0\nlanguage: de\n")
    flags = ("--output-dir", str(tmp_path / "out"), "--config", config)
    assert main([*flags, "--language", "en"]) == 0
    raised(SystemExit, None, main, flags)
    flags = ("--output-dir", str(tmp_path / "out"), "--tokenizer-name", tokenizer_folder)
    assert main([*flags, "--config", "gpst_own_text"]) == 0  # the name of a shipped configuration


def prepare_in_small_blocks(argv: list[str]) -> None:
    sources.BLOCK_CHARACTERS, shards.SHARD_CHARACTERS = 3000, 40_000
    main(argv)


def test_killed_run_resumes_byte_for_byte(tmp_path, words_folder, small_blocks):
    text = write(tmp_path / "text.txt", f"{TEXT}\n\n{TEXT}")  # long enough to be killed in the middle
    flags = {"train_files": text, "num_validation_documents": 2, "tokenizer_name": words_folder}
    flags |= {"validation_split": "none", "one_sentence_per_line": True}
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    argv = ["--output-dir", str(killed), "--preprocessing-num-workers", "2"]
    argv += [f"--{name}={value}" for name, value in flags.items()]
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=prepare_in_small_blocks, args=(argv,))
    process.start()
    deadline = time.monotonic() + 200
    while not (killed / "train" / "shard_00000").is_dir() or len(psutil.Process(process.pid).children()) < 2:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    assert not (killed / "train" / shards.INDEX_FILE).exists()
    refused("killed/train is not finished. Prepare it", PreparedCorpus, killed / "train")
    _, alive = psutil.wait_procs(children, timeout=20)
    assert len(children) >= 2 and not alive
    kept = (killed / "train" / "shard_00000" / shards.RECORD_FILE).stat().st_mtime_ns
    (killed / "train" / "shard_00090.partial").mkdir()
    arguments = CorpusArguments(**{**flags, "train_files": [text]})
    resumed = prepare(arguments, killed)
    assert (killed / "train" / "shard_00000" / shards.RECORD_FILE).stat().st_mtime_ns == kept
    prepare(arguments, straight)
    assert files_in(killed) == files_in(straight)
    assert len(resumed.train.records) >= 3 and resumed.validation.num_documents == 2
    # The vocabulary is too large for two bytes per token.
    tokens = resumed.train.shard(0).input_ids
    assert tokens.dtype == np.uint32 and tokens.max() >= 1 << 16
    words = resumed.tokenizer(TEXT.split("\n", 1)[0], add_special_tokens=False)["input_ids"]
    assert ContextDataset(resumed.validation, 4)[0]["input_ids"].tolist() == words[:4]
    assert encoding.token_dtype(1 << 16) == np.uint16 and encoding.token_dtype((1 << 16) + 1) == np.uint32


# Sources

DOCUMENTS = [
    "It rains. Mr. Smith, who was late,\nsays hello.",
    "Ça va? 漢字かな。 “Quoted.”",
    "",
    'One line\n\n with a blank line.\r\nAnd "quotes", commas.',
    "The end.",
]


def make_sources(kind: str, folder: Path, documents: list[str]) -> sources.TextSource:
    """The documents in two files of a format, or as a data set."""
    halves = (documents[:2], documents[2:])
    paths = [folder / f"{k}.{kind}" for k in range(2)]
    if kind == "txt":
        for path, half in zip(paths, halves, strict=True):
            write(path, "\n\n\n".join(text.replace("\n\n", "\n").replace("\r\n", "\r") for text in half) + "\n")
        return sources.TextFiles([str(path) for path in paths])
    if kind not in ("jsonl", "json", "csv"):
        paths = [folder / "data" / f"train-{k}.parquet" for k in range(2)]
        paths[0].parent.mkdir(parents=True)
    for path, half in zip(paths, halves, strict=True):
        rows = [{"n": k, "text": text or None} for k, text in enumerate(half)]
        if kind == "jsonl":
            write(path, "\n".join(json.dumps(row) for row in rows))
        elif kind == "json":
            write(path, json.dumps(rows, indent=1, ensure_ascii=False))
        elif kind == "csv":
            text = io.StringIO(newline="")
            table = csv.DictWriter(text, ["n", "text"])
            table.writeheader()
            table.writerows(rows)
            write(path, "\ufeff" + text.getvalue())
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    if kind in ("dataset", "stream"):
        return sources.HubSource(str(paths[0].parent), None, "train", "text", True, streaming=kind == "stream")
    readers = {"csv": sources.CSVFiles, "parquet": sources.ParquetFiles}
    return readers.get(kind, sources.JSONFiles)([str(path) for path in paths], "text", True)


KINDS = ("txt", "jsonl", "json", "csv", "parquet", "dataset", "stream")


def lines_of(source: sources.TextSource, **options) -> list[str]:
    return [line for block in sources.read_blocks([source], **options) for line in block.text.split("\n")[:-1]]


def counts_of(source: sources.TextSource) -> Counter[str]:
    return sum((block.counts for block in sources.read_blocks([source])), Counter())


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_lines(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROWS_PER_BATCH", 3)
    documents = [f"{text} {k}." if text else "" for k in range(3) for text in DOCUMENTS]
    source = make_sources(kind, tmp_path, documents)
    expected = []
    for text in filter(None, documents):
        lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
        expected += [*filter(None, lines), ""]
    for size in (1, 30, 10_000):
        monkeypatch.setattr(sources, "BLOCK_CHARACTERS", size)
        assert lines_of(source) == expected
        assert lines_of(source, max_documents=3) + lines_of(source, skip_documents=3) == expected
        assert lines_of(source, skip_documents=3, max_documents=4).count("") == 4
    assert source.describe() == json.loads(json.dumps(source.describe()))
    if kind in ("txt", "jsonl", "json", "csv"):  # compressed, and named as before
        for path in tmp_path.glob(f"*.{kind}"):
            path.write_bytes(gzip.compress(path.read_bytes()))
        assert lines_of(source) == expected


def test_rows_as_lines(tmp_path, tokenizer_folder):
    """The layout of WikiText: a row is a paragraph, blank rows end documents. A stream makes the same shards."""
    rows = ["", " = Title = \n", "", " One . Two . \n", " Three . \n", "", ""]
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "data" / "train.parquet")
    arguments = CorpusArguments(
        dataset_name=str(tmp_path / "data"), rows="lines", validation_split="none", num_validation_documents=1,
        tokenizer_name=tokenizer_folder,
    )  # fmt: skip
    text = prepare(arguments, tmp_path / "out")
    assert decoded(text) == [["One .", "Two .", "Three ."]]
    assert text.validation.num_sentences == 1
    prepare(replace(arguments, streaming=True), tmp_path / "streamed")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "streamed")


def test_words_of_treebanks_are_added(tmp_path, tokenizer_folder):
    lines = ["(S (NP (DT The) (NN cat)) (VP (VBD sat)) (. .))", "(S (. !))", "(S (UH Oh) (, ,))"]
    trees = write(tmp_path / "trees.txt", "\n".join(lines))
    text = write(tmp_path / "text.txt", "Well, it rains.")
    arguments = same_text(text, tokenizer_folder, train_trees=[trees], drop_punctuation=True)
    prepared = prepare(arguments, tmp_path / "out")
    assert decoded(prepared) == [["Well it rains"], ["The cat sat", "Oh"]]
    assert prepared.train.source_names() == ["text.txt", "the words of trees.txt"]


def test_tags_of_other_treebanks_tell_no_punctuation(tmp_path, tokenizer_folder):
    trees = write(tmp_path / "trees.txt", "(S (NP (ART Die) (NN Katze)) (VP (VVFIN schläft)) ($. .))")
    text = write(tmp_path / "text.txt", "Well, it rains.")
    arguments = same_text(text, tokenizer_folder, train_trees=[trees], drop_punctuation=True)
    refused(r"3 of 4 words have tags .*: leave out drop_punctuation", prepare, arguments, tmp_path / "out")
    assert not (tmp_path / "out" / "train").exists()  # nothing was encoded in vain


def test_formats_may_be_mixed_and_are_known_by_their_names(tmp_path, tokenizer_folder):
    paths = [write(tmp_path / "a.txt", "One."), write(tmp_path / "b.jsonl", '{"text": "Two."}')]
    arguments = CorpusArguments(train_files=paths, validation_files=paths[:1], tokenizer_name=tokenizer_folder)
    text = prepare(arguments, tmp_path / "out")
    assert [len(document) for document in sentences_of(text.train)] == [1, 1]
    names = {"a.PARQUET": "parquet", "a.pq": "parquet", "a.JSONL": "json", "a.ndjson": "json", "a.Csv": "csv"}
    names |= {"a.tsv": "tsv", "a.TXT": "text", "a": "text", "a.tsv.GZ": "tsv", "a.jsonl.xz": "json"}
    for name, kind in names.items():
        path = write(tmp_path / name, "x")
        (source,), _ = CorpusArguments(train_files=[path], validation_files=[path]).sources("train")
        assert source.describe()["kind"] == kind


# Messy text


def test_messy_text_survives_and_is_counted(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(sources, "LINE_LIMIT", 1 << 14)
    long_line = "é" * (sources.LINE_LIMIT - 3) + "x" + "漢字 " * 1000
    parts = ["\ufeffFirst line.\r\nSecond line.", " \t ", "\0\0", "A\0B.\rC.", long_line, "Last."]
    data = "\n\n".join(parts).encode() + b"\n\nbad \xff\xfe byte \xe6\xbc. \n\nU+FFFD itself: \xef\xbf\xbd"
    rows = ['{"text": "lone \\ud83d surrogate"}', "no json", "[1]", '{"text": null}', '{"other": "x"}', '{"text": " "}']
    rows.append("")
    rows.append('{"text": "NUL \\u0000 escaped, \\ud83d\\ude00 a pair')
    paths = [write(tmp_path / "messy.txt", data), write(tmp_path / "messy.jsonl", "\n".join(rows) + '"}')]
    paths.append(write(tmp_path / "empty.txt", ""))
    good = write(tmp_path / "good.txt", "Good.")
    how = {"tokenizer_name": tokenizer_folder, "one_sentence_per_line": True}
    text = prepare(CorpusArguments(train_files=paths, validation_files=[good], **how), tmp_path / "out")
    counts = {sources.BAD_CHARACTERS: 5, sources.CUT_LINES: 1, sources.BAD_ROWS: 2, sources.EMPTY_ROWS: 3}
    assert text.train.counts == counts | {sources.NULS: 4, shards.EMPTY_DOCUMENTS: 1}
    documents = ["\n".join(sentences) for sentences in decoded(text)]
    assert [x for x in documents if len(x) < 1000] == [
        "First line.\nSecond line.", "AB.\nC.", "Last.", "bad \ufffd\ufffd byte \ufffd\ufffd.", "U+FFFD itself: \ufffd",
        "lone \ufffd surrogate", "NUL  escaped, \U0001f600 a pair",
    ]  # fmt: skip
    (cut,) = [x for x in documents if len(x) >= 1000]
    assert cut.replace("\n", "").replace(" ", "") == long_line.replace(" ", "")
    for told in ("5 undecodable bytes and lone surrogates replaced", "4 NUL characters dropped", "iconv -f cp1252"):
        assert told in text.describe()
    assert json.loads((tmp_path / "out/train/corpus.json").read_text())["counts"] == text.train.counts


def test_rows_that_are_no_text_are_dropped(tmp_path):
    rows = ['{"other": 1}', '{"text": 5}', '{"text": "One."}', '{"text": ["a"]}', '{"text": "Two."}', '{"text": null}']
    paths = [write(tmp_path / "a.jsonl", "\n".join(rows)), write(tmp_path / "b.jsonl", '{"text": 5}')]
    for names in (paths, paths[:1]):
        source = sources.JSONFiles(names, "text", True)
        assert lines_of(source) == ["One.", "", "Two.", ""]
        assert counts_of(source) == {sources.ODD_ROWS: 1 + len(names), sources.EMPTY_ROWS: 2}


@pytest.mark.parametrize("kind", ["parquet", "dataset", "stream"])
def test_strings_of_arrow_that_are_no_utf8(kind, tmp_path):
    values = pyarrow.array([b"Good.", b"caf\xe9.", b"", None, "漢字.".encode()])
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(values), values.buffers())
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    source: sources.TextSource = sources.HubSource(
        str(tmp_path / "data"), None, "train", "text", True, streaming=kind == "stream"
    )
    if kind == "parquet":
        source = sources.ParquetFiles([str(path)], "text", True)
    assert lines_of(source) == ["Good.", "", "caf\ufffd.", "", "漢字.", ""]
    assert counts_of(source) == {sources.BAD_CHARACTERS: 1, sources.EMPTY_ROWS: 2}


def test_damaged_pages_of_parquet_name_the_file(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"Sentence {k}. " * 20 for k in range(2000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 90_000] = b"\xff" * 90_000
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as Parquet after row \d+: .*Get it again"):
        lines_of(sources.ParquetFiles([str(path)], "text", True))


def test_rows_and_cells_of_csv(tmp_path):
    data = b'n,text\r\n1,"quoted \r\nline,\rtwo"\r\n3\n4,NA'
    source = sources.CSVFiles([write(tmp_path / "a.csv", data)], "text", True)
    assert lines_of(source) == ["quoted", "line,", "two", "", "NA", ""]
    assert counts_of(source) == {sources.EMPTY_ROWS: 1, sources.LONG_ROWS: 1}


def test_quotation_marks_in_tables_lose_no_rows(tmp_path):
    """A line of a TSV is a row. A CSV whose marks do not balance is refused; rows over several lines are counted."""
    rows = ['1\t"we agree', '2\tthey are here ."', "3\tthe people agree .", '4\t"She said ""no"" ."', '5\t"all of it"']
    path = write(tmp_path / "a.tsv", "\n".join(["id\ttext", *rows]).encode())
    texts = ['"we agree', 'they are here ."', "the people agree .", 'She said "no" .', '"all of it"']
    assert list(filter(None, lines_of(sources.TSVFiles([path], "text", True)))) == texts
    quoted = write(tmp_path / "b.tsv", b'"id"\t"text"\n"1"\t"all of it"\n')
    assert list(filter(None, lines_of(sources.TSVFiles([quoted], "text", True)))) == ["all of it"]
    with pytest.raises(ValueError, match=r"c\.tsv:3: 1 fields, but the header names 2"):
        lines_of(sources.TSVFiles([write(tmp_path / "c.tsv", b'id\ttext\n1\t"two\nlines"\n')], "text", True))
    commas = "\n".join(["id,text", *rows]).replace("\t", ",").encode()
    merged = sources.CSVFiles([write(tmp_path / "a.csv", commas)], "text", True)
    lines_of(merged)
    assert counts_of(merged)[sources.LONG_ROWS] == 1
    open_mark = write(tmp_path / "b.csv", b'id,text\n1,"we agree\n2,they\n')
    refused("in a row that begins at line 2", lines_of, sources.CSVFiles([open_mark], "text", True))


def test_line_ends_and_cut_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LINE_LIMIT", 10)
    lines = ["ä" * 23, "a b c d e f g h   ", "x" * 10, "", "y" * 11, "", "", "z", " " * 30, "z"]
    for end in ("\n", "\r", "\r\n"):
        source = sources.TextFiles([write(tmp_path / "a.txt", end.join(lines))])
        documents = [list(group) for is_line, group in groupby(lines_of(source), key=bool) if is_line]
        expected = ["ä" * 23 + "abcdefgh" + "x" * 10, "y" * 11, "zz"]
        assert ["".join(document).replace(" ", "") for document in documents] == expected
        assert counts_of(source)[sources.CUT_LINES] == 5


def test_rows_larger_than_a_block_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_CHARACTERS", 500)
    row = "\n".join(f"Line {k}." for k in range(1000))
    path = write(tmp_path / "a.jsonl", json.dumps({"text": row}) + "\n" + json.dumps({"text": "Next."}))
    blocks = list(sources.read_blocks([sources.JSONFiles([path], "text", True)]))
    assert max(len(block.text) for block in blocks) < 1100 and len(blocks) > 8
    assert "".join(block.text for block in blocks) == f"{row}\n\nNext.\n\n"


UNREADABLE = [
    ("a.txt", "Text.".encode("utf-16-le"), "is UTF-16LE without a BOM. Convert it: iconv"),
    ("a.txt", "(S (NN cat))".encode("utf-16"), "a.txt begins with a tree"),
    ("a.txt", "Text.".encode("utf-16")[:-1], "a.txt: 'utf-16-le' codec can't decode byte"),
    ("a.jsonl", b"\x28\xb5\x2f\xfd zstd", "a.jsonl is compressed in an unknown format. Unpack it"),
    ("a.jsonl", '{"body": "x"}', r"no column 'text'. Set --text-column to one of \['body'\]"),
    ("a.jsonl", '{"text": 7}', "a.jsonl: column 'text' holds int, not text"),
    ("a.json", '[{"text": "x"}', "a.json is not JSON"),
    ("a.csv", "a,b\n1,2", "no column 'text'"),
    ("a.txt", b"( (S (NP (DT The) (NN cat)))\n)", "a.txt begins with a tree. Give its words, or pass"),
    ("a.txt", b"(S1 (S (NP=2 (DT The) (NN cat))))", "a.txt begins with a tree"),
    ("a.txt", b"(S-1 (NN cat))", "a.txt begins with a tree"),
    ("a.txt", b"PAR1 table", "a.txt is Parquet. Give it a name that ends in .parquet"),
    ("a.parquet", b"PAR1 no", "cannot be read as Parquet"),
    ("a.jsonl", "no\njson", r"has no tokens. Check files and options \(2 dropped rows .not JSON objects."),
]


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE)
def test_unreadable_sources_are_named(name, content, message, tmp_path, tokenizer_folder):
    path = write(tmp_path / name, content)
    good = write(tmp_path / "good.txt", "Good.")
    arguments = CorpusArguments(train_files=[path], validation_files=[good], tokenizer_name=tokenizer_folder)
    refused(message, prepare, arguments, tmp_path / "out")
    # Nothing was finished, so another text may take its place.
    assert prepare(replace(arguments, train_files=[good]), tmp_path / "out").train.num_documents == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_bracket_may_begin_a_text(tmp_path, encoding):
    text = "(I (really do) think that the people agree .)"
    path = write(tmp_path / "a.txt", text.encode(encoding))
    assert list(TextFiles([path]).lines(Counter())) == [text, ""]
    path = write(tmp_path / "a.jsonl", json.dumps({"text": text}).encode(encoding))
    assert list(sources.JSONFiles([path], "text", True).lines(Counter())) == [text, "", ""]


def test_bytes_that_are_not_utf_8_do_not_stop_a_run(tmp_path, tokenizer_folder):
    """Also where validation sentences are taken from the text."""
    (tmp_path / "a.txt").write_bytes("Anna\u2019s cat sat. It slept.\nSo what?\n".encode("cp1252"))
    arguments = CorpusArguments(train_files=[str(tmp_path / "a.txt")], tokenizer_name=tokenizer_folder)
    text = prepare(arguments, tmp_path / "out")
    assert "1 undecodable bytes" in text.validation.describe() and text.train.num_documents == 1


def test_too_few_documents_for_validation(tmp_path, tokenizer_folder):
    path = write(tmp_path / "a.txt", "One.\n\nTwo.\n\nThree.")
    arguments = CorpusArguments(train_files=[path], num_validation_documents=3, tokenizer_name=tokenizer_folder)
    refused("too few documents to take 3 for.*leave out --num-validation", prepare, arguments, tmp_path / "out")
    text = prepare(replace(arguments, num_validation_documents=2), tmp_path / "out")
    assert (text.train.num_documents, text.validation.num_documents) == (1, 2)
    # Files of all kinds count; treebanks do not, since there is no validating on them.
    more = write(tmp_path / "b.jsonl", '{"text": "Four."}')
    trees = write(tmp_path / "trees.txt", "(S (UH Oh))")
    mixed = replace(arguments, train_files=[path, more], train_trees=[trees])
    text = prepare(mixed, tmp_path / "mixed")
    assert (text.train.num_documents, text.validation.num_documents) == (2, 3)
    refused("too few documents to take 4 for", prepare, replace(mixed, num_validation_documents=4), tmp_path / "other")


def test_a_data_set_on_disk_is_one_split(tmp_path, tokenizer_folder):
    """`save_to_disk` of a single data set: validation text is taken from it."""
    Dataset.from_dict({"text": [f"This is number {n}." for n in range(20)]}).save_to_disk(str(tmp_path / "saved"))
    arguments = CorpusArguments(dataset_name=str(tmp_path / "saved"), tokenizer_name=tokenizer_folder)
    text = prepare(arguments, tmp_path / "out")
    assert (text.train.num_sentences, text.validation.num_sentences) == (18, 2)
    refused("train-split is 'test', but .*saved' has one split", replace, arguments, train_split="test")


def test_a_tenth_of_the_sentences_is_held_out(tmp_path, tokenizer_folder):
    """Also inside a line, and over documents and files; without validation text and a number of documents."""
    path = write(tmp_path / "a.txt", " ".join(f"This is number {n}." for n in range(25)))
    more = write(tmp_path / "b.jsonl", json.dumps({"text": "Number one.\nNumber two.\n"}) + "\n")
    arguments = CorpusArguments(train_files=[path, more], tokenizer_name=tokenizer_folder)
    (held,), _ = arguments.sources("validation")
    (rest,), _ = arguments.sources("train")
    assert lines_of(held) == ["This is number 0.", "This is number 1.", ""]
    kept = " ".join(f"This is number {n}." for n in range(2, 25))
    assert lines_of(rest) == [kept, "", "Number one.", "Number two.", ""]
    text = prepare(arguments, tmp_path / "out")
    assert (text.train.num_sentences, text.validation.num_sentences) == (25, 2)
    assert text.train.source_names() == ["a.txt", "b.jsonl"]
    prepare(arguments, tmp_path / "out")
    one = write(tmp_path / "one.txt", "One sentence.")
    refused("the text has 1 sentence, but training", prepare, replace(arguments, train_files=[one]), tmp_path / "one")


# What is refused


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_folder: str, small_blocks: None) -> tuple[CorpusArguments, PreparedText]:
    arguments = same_text(write(tmp_path / "text.txt", SHORT), tokenizer_folder)
    return arguments, prepare(arguments, tmp_path / "out")


def test_changed_options_and_input_are_refused(prepared, tmp_path):
    arguments, _ = prepared
    out = tmp_path / "out"
    train_bpe_tokenizer(TEXT.splitlines()[:300], 410).save_pretrained(tmp_path / "other")
    changes = {
        "text.language was 'en' and is now 'de'": replace(arguments, language="de"),
        "text.drop_punctuation was False and is now True": replace(arguments, drop_punctuation=True),
        "encoded with another tokenizer": replace(arguments, tokenizer_name=str(tmp_path / "other")),
        "tokenizer_type was None and is now 'bpe'": replace(arguments, tokenizer_name=None),
        "documents.skip_documents was None": replace(arguments, validation_files=[], num_validation_documents=1),
    }
    for message, changed in changes.items():
        refused(message, prepare, changed, out)
    Path(arguments.train_files[0]).write_text("Another text.")
    refused("prepared in another way: from other files. Use the old values again", prepare, arguments, out)
    # The same holds for a folder that is not finished.
    (out / "train" / shards.INDEX_FILE).unlink()
    refused("Use the old values again", prepare, arguments, out)
    # So is what an earlier version has made, finished or not.
    shutil.rmtree(out / "train" / "shard_00000")
    old = json.loads((out / "train" / shards.MADE_FROM_FILE).read_text())
    files.write_json(out / "train" / shards.MADE_FROM_FILE, {**old, "format": 1})
    for index in ("", "{}"):
        write(out / "train" / shards.INDEX_FILE, "{}") if index else None
        message = f"^{out}/train .*format 1, .* run python training/prepare_text.py --output-dir"
        refused(f"{message} {out} ", prepare, arguments, out)


def test_finished_folder_without_text(prepared, tmp_path):
    arguments, text = prepared

    def given(**options) -> PrepareArguments:
        return PrepareArguments(output_dir=str(tmp_path / "out"), **options)

    for options in ({}, {"tokenizer_name": arguments.tokenizer_name}, {"preprocessing_num_workers": 4}):
        assert given(**options).takes_finished
        assert prepare(given(**options), tmp_path / "out").train.fingerprint() == text.train.fingerprint()
    # The tokenizer was named: a configuration may say how one is trained.
    assert prepare(given(tokenizer_type="wordpiece", tokenizer_vocab_size=77), tmp_path / "out")
    made_with = tmp_path / "out" / "tokenizer" / shards.MADE_FROM_FILE
    made_with.write_text(json.dumps({"tokenizer_vocab_size": 400}))
    for options in ({"language": "de"}, {"rows": "lines"}, {"tokenizer_vocab_size": 77}):
        named = f"{next(iter(options))} is .*Leave the option out, or name the text"
        refused(named, prepare, given(**options), tmp_path / "out")


def test_prepared_without_text_has_to_be_complete(tmp_path: Path) -> None:
    said = "typo is not a complete folder of prepared text, and no text is named. Correct"
    refused(said, DataArguments, prepared=str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()
    assert DataArguments(prepared=str(tmp_path / "new"), train_files=["embedded"]).train_files  # text is named
    assert DataArguments().train_files == [str(sample_path("raw.train.txt"))]


def gpst_arguments(*flags: str) -> tuple[DataArguments, EvaluationArguments]:
    types = GPSTRecipe.parts.values()
    _, data, evaluation, _ = parse_arguments(types, ["--config", "gpst_tiny", "--output-dir", "x", *flags])
    evaluation.complete(data)
    return data, evaluation


@pytest.mark.parametrize("named", ["train_files", "train_trees"])
def test_only_named_text_is_read(tmp_path: Path, named: str) -> None:
    trees = ("(S (PRP we) (VBP rest))\n" if named == "train_trees" else "We rest.\n") * 2
    mine, held_out = (write(tmp_path / name, trees) for name in ("mine.mrg", "held_out.mrg"))
    data, evaluation = gpst_arguments(f"--{named}", mine)
    assert evaluation.validation_trees is evaluation.test_trees is None
    if named == "train_trees":
        refused("No validation text is named. Pass --validation-words TREEBANK or", data.sources, "validation")
        data, evaluation = gpst_arguments(f"--{named}", mine, "--validation-trees", held_out)
        assert [source.paths for source in data.sources("validation")[0]] == [[held_out]]
    assert [source.paths for source in data.sources("train")[0]] == [[mine]]


def test_embedded_text_is_the_default() -> None:
    data, evaluation = gpst_arguments()
    names = [Path(path).name for source in data.sources("train")[0] for path in source.paths]
    assert names == ["raw.train.txt", "trees.train.txt"]
    assert Path(evaluation.validation_trees).name == "trees.valid.txt"


def test_other_programs_read_only_named_trees(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.mrg", "(S (PRP we) (VBP rest))\n")
    refused("No training text is named", DataArguments(validation_files=[mine]).sources, "train")
    refused("--train-files are not set, but other files are", SentenceFileArguments, validation_files=[mine])
    refused("validation-trees is not set. Pass a treebank file with it", InductionArguments, train_trees=[mine])
    named = InductionArguments(train_trees=[mine], validation_trees=mine, test_trees=mine)
    assert list(named.sentences()) == [["we", "rest"]]


def test_other_cuts_are_refused(prepared, tmp_path, monkeypatch):
    """Shards of a stopped run that another version of the library cut elsewhere must not be continued."""
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 30_000)
    refused("cuts", prepare, prepared[0], tmp_path / "out")


def test_missing_files_are_named(prepared, tmp_path):
    out = tmp_path / "out"
    (out / "train" / shards.MADE_FROM_FILE).unlink()
    refused(r"train/made_from.json is missing. Restore it, or delete .*out/train and prep", prepare, prepared[0], out)
    (out / "tokenizer" / shards.MADE_FROM_FILE).unlink()
    finished = PrepareArguments(output_dir=str(out))
    refused(r"tokenizer/made_from.json is missing. Restore it, or delete .*out/tokenizer", prepare, finished, out)


@pytest.mark.parametrize("is_finished", [True, False])
def test_damaged_shards_are_named(is_finished, prepared, tmp_path):
    arguments, text = prepared
    train = tmp_path / "out" / "train"
    straight = files_in(train)
    assert len(text.train.records) == 3
    shard = train / "shard_00001" / "data-00000-of-00001.arrow"
    if not is_finished:
        (train / shards.INDEX_FILE).unlink()

    def refuses(message: str, **options) -> None:
        refused(message, prepare, arguments, tmp_path / "out", **options)

    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refuses("shard_00001/.*arrow has .* bytes instead of")
    shard.unlink()
    refuses("shard_00001/.*arrow is missing. Restore it; or delete")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    shard.write_bytes(damaged)
    refuses("shard_00001/.*arrow is damaged: its checksum", verify=True)
    # The remedy that the messages name.
    (train / shards.INDEX_FILE).unlink(missing_ok=True)
    shutil.rmtree(train / "shard_00001")
    prepare(arguments, tmp_path / "out", verify=True)
    assert files_in(train) == straight
    state = (train / "shard_00001" / "state.json").read_bytes()
    (train / "shard_00001" / "state.json").write_text("{}")
    refused("shard_00001 cannot be opened.*Restore it; or delete", PreparedCorpus(train).shard, 1)
    (train / "shard_00001" / "state.json").write_bytes(state)
    (train / shards.INDEX_FILE).write_text("{")
    refuses("corpus.json is damaged")


def test_full_disk(tmp_path, tokenizer_folder, small_blocks):
    arguments = same_text(write(tmp_path / "text.txt", SHORT), tokenizer_folder)
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # room for the tokenizer, but not for a shard
    try:
        raised(OSError, "shard_00000 could not be written.*make room and run", prepare, arguments, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (out / "train").iterdir()] == [shards.MADE_FROM_FILE]
    prepare(arguments, out)
    prepare(arguments, tmp_path / "straight")
    assert files_in(out) == files_in(tmp_path / "straight")


def test_command_names_errors(tmp_path, tokenizer_folder, capsys):
    write(tmp_path / "file", "no folder")
    out = ["--output-dir", str(tmp_path)]
    for flags, message in (
        (["--output-dir", str(tmp_path / "file" / "out"), "--tokenizer-name", tokenizer_folder], "Not a directory"),
        ([*out, "--train-files", "absent.txt"], "There is no file 'absent.txt'"),
        ([*out, "--rows", "words"], "invalid choice: 'words'"),
        ([], "required: --output-dir"),
        ([*out, "--config", write(tmp_path / "a.yaml", "a: [1\n")], "is not valid YAML"),
        ([*out, "--config", write(tmp_path / "b.yaml", "")], "does not contain a mapping"),
        ([*out, "--config", write(tmp_path / "c.yaml", "train_files: no.txt")], "'no.txt'"),
        ([*out, "--config", "no.yaml"], "There is no config file and no shipped configuration 'no.yaml'"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(flags)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_lists_may_be_empty(tmp_path, tokenizer_folder):
    good = write(tmp_path / "good.txt", "Good.")
    text = f"train_files: {good}\nvalidation_files: [{good}]\ntokenizer_name: {tokenizer_folder}\n"
    config = write(tmp_path / "a.yaml", text + "train_trees: [absent.txt]\n")
    assert main(["--output-dir", str(tmp_path / "out"), "--config", config, "--train-trees"]) == 0
    (data,) = parse_arguments([DataArguments], ["--config", config, "--train-trees"])
    assert (data.train_files, data.train_trees) == ([good], [])
    (data,) = parse_arguments([DataArguments], ["--config", write(tmp_path / "b.yaml", text + "train_trees: []")])
    assert data.train_trees == []
    refused("--x '{a: .1' is not valid YAML", read_mapping, "{a: [1", "x")


# Encoding


def test_tokenizers_that_cannot_be_used(tmp_path):
    text = write(tmp_path / "text.txt", "the cat")

    def prepared_with(vocabulary: dict[str, int], unknown: str, text: str) -> PreparedText:
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "words")
        return prepare(same_text(text, str(tmp_path / "words")), tmp_path / "out")

    with pytest.raises(ValueError, match="has 2 tokens, but its largest id is 70000. Number its tokens from 0 to 1"):
        prepared_with({"the": 0, "cat": 70_000}, "the", text)
    with pytest.raises(ValueError, match="tokenizer cannot encode the text: .*add the unknown token to the vocabulary"):
        prepared_with({"the": 0}, "<unk>", text)
    shutil.rmtree(tmp_path / "out")
    assert sentences_of(prepared_with({"the": 0, "cat": 1}, "<unk>", text).train) == [[[0, 1]]]


def test_splitting_special_tokens_is_part_of_a_tokenizer(tmp_path, tokenizer_folder):
    text = write(tmp_path / "text.txt", "the <|endoftext|> cat")
    lengths = []
    for value in (False, True):
        tokenizer = load_tokenizer(tokenizer_folder)
        tokenizer.split_special_tokens = value
        tokenizer.save_pretrained(tmp_path / str(value))
        config = json.loads((tmp_path / str(value) / "tokenizer_config.json").read_text())
        write(tmp_path / str(value) / "tokenizer_config.json", json.dumps({**config, "split_special_tokens": value}))
        arguments = same_text(text, str(tmp_path / str(value)))
        lengths.append(prepare(arguments, tmp_path / f"out_{value}").train.num_tokens)
        assert prepare(arguments, tmp_path / f"out_{value}").train.num_tokens == lengths[-1]
    assert lengths[0] < lengths[1]
    refused("encoded with another tokenizer", prepare, arguments, tmp_path / "out_False")


def test_tokenizer_hash_survives_saving(tmp_path, tokenizer_folder):
    train_wordpiece_tokenizer(TEXT.splitlines()[:100], 300).save_pretrained(tmp_path / "wordpiece")
    seen = set()
    for folder in (tokenizer_folder, tmp_path / "wordpiece"):
        tokenizer = load_tokenizer(folder)
        tokenizer(["a b", "c"], truncation=True, max_length=1, padding=True)  # leaves traces in the backend
        tokenizer.save_pretrained(tmp_path / "again")
        assert encoding.tokenizer_sha256(load_tokenizer(tmp_path / "again")) == encoding.tokenizer_sha256(tokenizer)
        seen.add(encoding.tokenizer_sha256(tokenizer))
    assert len(seen) == 2


def test_sentences_without_tokens_are_dropped(tmp_path):
    train_wordpiece_tokenizer(["a b c"], 20).save_pretrained(tmp_path / "tokenizer")
    # The normalization of BERT deletes control characters.
    path = write(tmp_path / "text.txt", "a\n\u200b\x01\nb\n\n\x01\n\nc")
    arguments = same_text(path, str(tmp_path / "tokenizer"), one_sentence_per_line=True)
    corpus = prepare(arguments, tmp_path / "out").train
    assert [len(document) for document in sentences_of(corpus)] == [2, 1]
    assert corpus.counts == {shards.EMPTY_SENTENCES: 2, shards.EMPTY_DOCUMENTS: 1}


def test_word_ends_of_tokens_without_word():
    word_ids = [[0, 0, None, 1], [], [None], [0, 1, 1]]
    lengths = np.array([4, 0, 1, 3], np.uint32)
    expected = [end for ids in word_ids for end in word_ends_from_word_ids(ids)]
    assert encoding._word_ends(word_ids, lengths).tolist() == expected


# Packing

SENTENCE = st.lists(st.integers(10, 30), min_size=1, max_size=9)
DOCUMENTS_OF_IDS = st.lists(st.lists(SENTENCE, max_size=5), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(DOCUMENTS_OF_IDS, st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 12),
    st.none() | st.integers(1, 9),
    st.booleans(),
)
def test_contexts_equal_the_reference(tmp_path_factory, parts, length, longest, mark):
    if not any(ids for documents, _, _ in parts for document in documents for ids in document):
        parts = [([[[11]]], False, False)]
    blocks: list[list[dict]] = [[]]
    for k, (documents, is_open, is_new) in enumerate(parts):
        if is_new and k:
            blocks.append([])
        blocks[-1].append(encoded(documents, is_open and k < len(parts) - 1))
    corpus = corpus_of(tmp_path_factory.mktemp("corpus"), blocks)
    whole: list[list[list[int]]] = [[]]
    for k, (documents, is_open, _) in enumerate(parts):
        whole[-1] = whole[-1] + documents[0]
        whole += documents[1:]
        if not is_open or k == len(parts) - 1:
            whole.append([])
    assert sentences_of(corpus) == [document for document in whole if document]

    # A shard ends a context, and a document that goes on in the next shard has its end token there, if at all.
    expected: list[tuple[list[int], list[int]]] = []
    totals: Counter[str] = Counter()
    for number, record in enumerate(corpus.records):
        shard = corpus.shard(number)
        starts = [0, *shard.sentence_ends.tolist()]
        sentences = [shard.input_ids[i:j].tolist() for i, j in zip(starts, starts[1:], strict=False)]
        bounds = [0, *shard.document_ends.tolist(), len(sentences)]
        documents = [sentences[i:j] for i, j in zip(bounds, bounds[1:], strict=False)]
        last = documents.pop()
        packed = pack_contexts([*documents, last], length, longest, END if mark else None)
        if record.ends_inside_document and mark and any(longest is None or len(ids) <= longest for ids in last):
            if packed.input_ids[-1][-1] == END:
                packed.input_ids[-1].pop()
                packed.sentence_ids[-1].pop()
        expected += zip(packed.input_ids, packed.sentence_ids, strict=True)
        totals.update(cut=packed.num_cut, left_out=packed.num_left_out)
    options = {"max_sentence_tokens": longest, "end_of_document_id": END if mark else None}
    if not expected:
        refused("gives no context, only", ContextDataset, corpus, length, **options)
        return
    dataset = ContextDataset(corpus, length, with_word_ends=True, **options)
    assert [(item["input_ids"].tolist(), item["sentence_ids"].tolist()) for item in dataset] == expected
    for item in dataset:
        assert (item["word_ends"] == (item["input_ids"] % 2 == 1)).all()  # END is odd too
    assert dataset.totals() == {
        "contexts": len(expected),
        "tokens": sum(len(ids) for ids, _ in expected),
        "sentences": sum(numbers[-1] for _, numbers in expected),
        **totals,
    }


def test_packing_by_hand(tmp_path):
    documents = [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10, 11, 12], [13]], [[14] * 6, [15]], [[16] * 6]]
    corpus = corpus_of(tmp_path, [[encoded(documents)]])

    def contexts(**options) -> list[list[int]]:
        return [item["input_ids"].tolist() for item in ContextDataset(corpus, 5, **options)]

    assert contexts()[:3] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14][:3]]
    # The mark of the first document does not fit; sentences of more than five tokens go, and so does a document.
    assert contexts(end_of_document_id=0, max_sentence_tokens=5) == [[1, 2, 3, 4, 5], [13, 0, 15, 0]]
    opening, totals = pack_sentences(np.array([3, 5, 12, 13]), np.array([2, 4]), 5, mark_documents=True)
    assert opening.tolist() == [[0, 0], [2, 5], [2, 10]]
    assert totals == {"contexts": 3, "tokens": 14, "sentences": 6, "cut": 1, "left_out": 0}
    dataset = ContextDataset(corpus, 5)
    assert dataset[-1]["input_ids"].tolist() == dataset[len(dataset) - 1]["input_ids"].tolist()
    with pytest.raises(IndexError, match="context 99 does not exist"):
        dataset[99]


def test_datasets_travel_to_other_processes(tmp_path, prepared):
    dataset = ContextDataset(prepared[1].train, 64, with_word_ends=True)
    items = list(dataset)
    sent = pickle.dumps(dataset)
    assert len(sent) < 4000  # no tokens, no index
    for item, again in zip(items, pickle.loads(sent), strict=True):
        assert all((item[name] == again[name]).all() for name in item)
    options = {"num_workers": 2, "multiprocessing_context": "fork", "collate_fn": dict}
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, **options)
    assert [item["input_ids"].tolist() for item in loader] == [item["input_ids"].tolist() for item in items]


def test_index_of_contexts_is_kept_and_repaired(tmp_path, prepared, monkeypatch, caplog):
    corpus = prepared[1].train
    first = ContextDataset(corpus, 64)
    (path,) = corpus.folder.glob("contexts_*.npy")
    written = path.read_bytes()
    assert len(written) < 8 * len(first) + 200  # eight bytes per context
    stamp = path.stat().st_mtime_ns
    again = ContextDataset(corpus, 64)
    assert path.stat().st_mtime_ns == stamp and again.fingerprint() == first.fingerprint()
    path.write_bytes(written[:-5])
    assert len(list(ContextDataset(corpus, 64))) == len(first) and path.read_bytes() == written
    fingerprints = {first.fingerprint(), ContextDataset(corpus, 63).fingerprint()}
    fingerprints |= {ContextDataset(corpus, 64, max_sentence_tokens=9).fingerprint()}
    fingerprints |= {ContextDataset(corpus, 64, end_of_document_id=1).fingerprint()}
    assert len(fingerprints) == 4

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_synlm.data.contexts.write_bytes", full)
    in_memory = ContextDataset(corpus, 50)
    assert "is kept in memory" in caplog.text
    assert len(pickle.loads(pickle.dumps(in_memory))[0]["input_ids"]) <= 50
