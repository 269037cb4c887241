"""Workers, memory that is out, files of results, and interruptions: the same results and errors as in one process."""

import json
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from typing import NamedTuple

import pytest
import torch

from hf_synlm.evaluation.text.cache import ResultCache
from hf_synlm.evaluation.text.processes import iterate_batches, num_workers
from hf_synlm.evaluation.text.surprisal import score_words, word_table
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from tests.helpers.refusals import raised, refused
from tests.helpers.scoring_models import SENTENCES, model_and_tokenizer, scorer_of

ITEMS = [TextItem(str(k), text) for k, text in enumerate([*SENTENCES, *(s[:20] for s in SENTENCES), SENTENCES[0]])]


class Number(NamedTuple):
    """A text of this test."""

    value: int
    num_tokens: int = 1


BATCHES = [[Number(0), Number(1)], [Number(2), Number(3)], [Number(4)]]


def squares(batch: list[Number]) -> list[dict]:
    return [{"square": text.value**2} for text in batch]


def describe_worker(batch: list[Number]) -> list[dict]:
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return [{"process": os.getpid(), "threads": torch.get_num_threads(), "blocked": blocked} for _ in batch]


def refuse_three(batch: list[Number]) -> list[dict]:
    if Number(3) in batch:
        raise ValueError("three is refused")
    return squares(batch)


def die(batch: list[Number]) -> list[dict]:
    os.kill(os.getpid(), signal.SIGKILL)
    return squares(batch)


def sleep(batch: list[Number]) -> list[dict]:
    time.sleep(60)
    return squares(batch)


def run(compute, *, num_processes=2, batches=BATCHES, **options):
    return dict(
        iterate_batches(compute, batches, model_and_tokenizer("gpst")[0], num_processes=num_processes, **options)
    )


@pytest.mark.parametrize("architecture", ["gpst", "gpt2"])
def test_workers_score_like_one_process(architecture):
    tables = []
    for number in (1, 2):
        scorer = scorer_of(architecture, details=True, batch_size=2, num_processes=number)
        tables.append(word_table(ITEMS, score_words(scorer, ITEMS)))
    for one, two in zip(*tables, strict=True):
        assert one == pytest.approx(two, abs=1e-5, nan_ok=True)


def test_workers_parse_like_one_process():
    model, tokenizer = model_and_tokenizer("rnng_pieces")
    options = {"batch_size": 1, "num_return_sequences": 2}
    sentences = [*SENTENCES, "We ask"]
    one, two = (parse_sentences(model, tokenizer, sentences, num_processes=number, **options) for number in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert first.hypotheses == second.hypotheses and first.words == second.words
        assert first.word_log_probs == pytest.approx(second.word_log_probs, abs=1e-5)


def test_workers():
    """Each has one thread, and leaves Ctrl-C to the process that asks."""
    found = run(describe_worker).values()
    assert os.getpid() not in {worker["process"] for worker in found}
    assert {(worker["threads"], worker["blocked"]) for worker in found} == {(1, True)}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert list(run(squares)) == [text for batch in BATCHES for text in batch]


@pytest.mark.parametrize(
    ("compute", "error", "message"),
    [(refuse_three, ValueError, "three is refused"), (die, ChildProcessError, "one of 2 worker processes died")],
)
def test_errors_of_workers(compute, error, message):
    raised(error, message, run, compute)


def test_progress_in_a_file_is_a_line_every_ten_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def wait(batch: list[Number]) -> list[dict]:
        now[0] += seconds
        return squares(batch)

    seconds = 1.0
    run(wait, num_processes=1, progress="surprisal: m")
    assert capsys.readouterr().err == "", "short commands are quiet"
    seconds = 6.0
    run(wait, num_processes=1, progress="surprisal: m")
    first, *_, last = [line.strip() for line in capsys.readouterr().err.split("\n") if line.strip()]
    assert (first, last) == (
        "surprisal: m: 4 of 5 tokens,  0.33 tokens/s, 00:02 left",
        "surprisal: m: 5 of 5 tokens,  0.28 tokens/s, 00:00 left",
    )
    run(wait, num_processes=1)
    assert capsys.readouterr().err == ""


def test_interrupted_workers_end_at_once():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may ignore it
    start = time.monotonic()
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
    raised(KeyboardInterrupt, None, run, sleep)
    assert time.monotonic() - start < 30 and not multiprocessing.active_children()


def test_how_many_processes(monkeypatch):
    model = model_and_tokenizer("gpst")[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [num_workers(None, model, n) for n in (10, 4000, 9000, 10**6)] == [1, 2, 4, 8]
    assert num_workers(3, model, 1) == 3
    refused("accelerate launch", num_workers, 2, torch.empty(0, device="meta"), 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert num_workers(None, model, 10**6) == 1


def test_batches_are_halved_where_memory_is_out(caplog):
    sizes = []

    def compute(batch: list[Number]) -> list[dict]:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return squares(batch)

    texts = [Number(k) for k in range(5)]
    found = run(compute, num_processes=1, batches=[texts])
    assert [found[text]["square"] for text in texts] == [0, 1, 4, 9, 16]
    assert sizes == [5, 2, 3, 1, 2] and "Out of memory with 5 texts at once: continuing with 2" in caplog.text
    raised(
        torch.OutOfMemoryError, None, run, lambda batch: compute([*batch] * 3), num_processes=1, batches=[[Number(1)]]
    )


def test_a_killed_run_continues(tmp_path):
    """To the last bit; of a batch that is incomplete in the file, all is computed again."""
    model, calls = model_and_tokenizer("gpst")[0], []

    def compute(batch: list[Number], *, until: int = 9) -> list[dict]:
        if len(calls) == until:
            raise KeyboardInterrupt
        calls.append(batch)
        return [{"third": text.value / 3 if text.value else float("nan")} for text in batch]

    cache = ResultCache(tmp_path / "new" / "cache.jsonl", model, {"num_beams": 3})
    raised(KeyboardInterrupt, None, run, partial(compute, until=2), num_processes=1, cache=cache)
    assert len(cache.path.read_text().splitlines()) == 1 + 4
    with cache.path.open("r+b") as file:
        file.truncate(cache.path.stat().st_size - 3)
    calls.clear()
    found = run(compute, num_processes=1, cache=cache)
    assert calls == BATCHES[1:]
    assert json.dumps(list(found.values())) == json.dumps(list(run(compute, num_processes=1).values()))
    calls.clear()
    assert json.dumps(run(compute, num_processes=1, cache=cache)[Number(1)]) == '{"third": 0.3333333333333333}'
    assert calls == []


def test_files_of_other_results_are_refused(tmp_path):
    model, path = model_and_tokenizer("gpst")[0], tmp_path / "cache.jsonl"
    ResultCache(path, model, {"num_beams": 3}).read()
    assert ResultCache(path, model, {"num_beams": 3}).read() == {}
    refused("num_beams 3 instead of 4", ResultCache(path, model, {"num_beams": 4}).read)
    refused("another model", ResultCache(path, model_and_tokenizer("rnng")[0], {"num_beams": 3}).read)
    for text in ("notes", "[]\n", '{"a": 1}\n'):
        path.write_text(text)
        refused("cache.jsonl", ResultCache(path, model, {}).read)
        assert path.read_text() == text
    scorer = scorer_of("rnng", cache=tmp_path / "scores.jsonl")
    score_words(scorer, ITEMS)
    refused("end False instead of True", score_words, scorer, ITEMS, end=True)
