"""Training of recurrent language models: schedules, segments, perplexity, F1, and what is refused."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

from hf_synlm import ONLSTMForCausalLM
from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.on_lstm import RULES
from hf_synlm.conversion.rename import rename_state_dict
from hf_synlm.data.streams import SentenceCode, make_stream
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.evaluation.trees.gold_treebank import make_treebank
from hf_synlm.evaluation.trees.parsing import unlabeled_f1
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.training.arguments import base as run_arguments, text as text_arguments
from hf_synlm.training.engine import run as common, samplers
from hf_synlm.training.programs import train_recurrent
from hf_synlm.training.tasks import stream_batches, stream_schedule as schedules, text_recipe
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused
from tests.helpers.training_runs import PACKAGE_FILES, TINY, last_wins, results_of, sample_treebank


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A few trees of the embedded treebank, and the same sentences as text."""
    return sample_treebank(tmp_path_factory.mktemp("trees"), train=30, valid=8, test=5)


def flags(corpus: dict[str, str], output_dir: Path, architecture: str, *more: str) -> list[str]:
    given = [
        *("--architecture", architecture, "--config-overrides", TINY[architecture], "--output-dir", str(output_dir)),
        *("--train-files", corpus["train"], "--validation-files", corpus["valid"], "--test-files", corpus["test"]),
        *("--per-device-train-batch-size", "3", "--per-device-eval-batch-size", "2", "--bptt", "8"),
        *("--learning-rate", "1", "--logging-steps", "1", "--parse-sentences", "4", *more),
    ]
    return last_wins(given)


def parse(*flags: str) -> tuple:
    recipe = train_recurrent.RecurrentRecipe
    return run_arguments.parse_arguments(recipe.parts.values(), ("--output-dir", "x", *flags))


# ---------------------------------------------------------------------------------------------- schedules
arguments = schedules.ScheduleArguments
TRIGGER = [4.0, 3.0, 3.5, 3.2, 3.1, 2.0]
RISE = [1.0, 2.0, 1.5, 1.0, 1.0, 1.0]


PHASES = [
    # Of the losses before the fifth, all but the last two have the minimum 3, which it exceeds.
    (TRIGGER, {"non_monotone_interval": 2}, "fffffaa"),
    (TRIGGER, {"non_monotone_interval": 3}, "fffffff"),
    ([4.0, 3.0, 2.0, 1.0], {"non_monotone_interval": 1}, "fffff"),
    # One loss before the interval is enough, none is not.
    ([1.0, 2.0], {"non_monotone_interval": 1}, "fff"),
    ([1.0, 2.0, 1.5], {"non_monotone_interval": 1}, "fffa"),
    # The authors' code begins to fine-tune at this epoch or not at all.
    (RISE, {"non_monotone_interval": 1, "finetuning_epoch": 5}, "fffaaFF"),
    (RISE, {"non_monotone_interval": 1, "finetuning_epoch": 4}, "fffaFFF"),
    (RISE, {"non_monotone_interval": 1, "finetuning_epoch": 3}, "fffaaaa"),
    ([1.0] * 4, {"schedule": "adam-asgd", "averaging_epoch": 2, "finetuning_epoch": 4}, "ffaaF"),
]


@pytest.mark.parametrize(("losses", "changes", "expected"), PHASES)
def test_phases_of_epochs(losses: list[float], changes: dict[str, Any], expected: str) -> None:
    """The phase of each epoch, the one after the last loss included: f(irst), a(veraging), F(inetuning)."""
    schedule = arguments(**changes, averaging_learning_rate=7.0)
    phases = [schedules.phase_after(losses[:n], schedule, 30.0) for n in range(len(losses) + 1)]
    assert "".join({"finetuning": "F"}.get(phase.name, phase.name[0]) for phase in phases) == expected
    assert all(phase.learning_rate == (30.0 if phase.name == "first" else 7.0) for phase in phases)


def test_rate_is_halved_on_plateaus_as_torch_does() -> None:
    losses = [5.0, 4.0, 4.0, 4.5, 4.1, 3.0, 3.0, 3.0, 3.1, 3.2, 3.3, 2.0]
    for patience in (0, 1, 2):
        schedule = arguments(schedule="adam-plateau", plateau_patience=patience, plateau_factor=0.5)
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
        settings = {"factor": 0.5, "patience": patience, "threshold": 0.0, "eps": 0.0}
        stock = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **settings)
        for count, loss in enumerate(losses, start=1):
            stock.step(loss)
            phase = schedules.phase_after(losses[:count], schedule, 0.8)
            assert phase == ("first", optimizer.param_groups[0]["lr"])


def make_optimizer(model: torch.nn.Module, **changes: Any) -> schedules.PhasedOptimizer:
    training = text_arguments.RecurrentTrainingArguments(output_dir="x", weight_decay=1.2e-6, learning_rate=5.0)
    return schedules.make_phased_optimizer(Accelerator(cpu=True), model, arguments(**changes), training)[1]


def test_averages_are_those_of_all_steps_but_the_first() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer(model)
    before = model.weight.detach().clone()
    with optimizer.averaged_weights():  # nothing to average yet
        assert torch.equal(model.weight, before)
    for phase in ("averaging", "finetuning"):
        assert optimizer.enter(schedules.Phase(phase, 0.5))
        seen = []
        for step in range(5):
            optimizer.scale = 1.0 + step
            model(torch.randn(3, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.weight.detach().clone())
        with optimizer.averaged_weights():
            torch.testing.assert_close(model.weight, torch.stack(seen[1:]).mean(0))
        assert torch.equal(model.weight, seen[-1])
    assert not optimizer.first.optimizer.state


def test_sgd_and_averaging_repeat_the_authors_trace() -> None:
    """Three steps of SGD and four of ASGD on an ON-LSTM with segments of unequal length."""
    state, trace, meta = read_case("onlstm/optim_trace_sgd_asgd")
    model = convert_state_dict("on_lstm", state, meta).train()
    optimizer = make_optimizer(model)
    # In the authors' code, the last word of the vocabulary learns nothing as an input, by accident.
    model.model.embed_tokens.padding_idx = model.config.vocab_size - 1
    start, cache = 0, None
    for step, entry in enumerate(meta["log"]):
        if step == 3:
            assert entry["opt"] == "ASGD" and optimizer.enter(schedules.Phase("averaging", meta["lr"]))
        ids, targets = (trace["stream"][start + k : start + k + entry["T"]].t() for k in (0, 1))
        output = model(ids, shift_labels=targets, past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, start + entry["T"]
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), meta["clip"])
        assert (output.loss.item(), norm.item()) == pytest.approx((entry["loss"], entry["grad_norm"]), rel=1e-5)
        optimizer.scale = entry["T"] / meta["bptt"]
        optimizer.step()
        optimizer.zero_grad()
        same_weights(model, trace, f"step{step}.")
        if step >= 3:
            with optimizer.averaged_weights():
                same_weights(model, trace, f"step{step}.ax.")


def same_weights(model: torch.nn.Module, trace: dict[str, torch.Tensor], prefix: str) -> None:
    stored = {name.removeprefix(prefix): value for name, value in trace.items() if name.startswith(prefix)}
    expected = rename_state_dict({name: value for name, value in stored.items() if "ax." not in name}, RULES)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=2e-6, msg=f"{prefix}{name}")


# ---------------------------------------------------------------------------------------------- segments
def segments(**changes: Any) -> stream_batches.SegmentSampler:
    options = {"num_tokens": 3001, "num_rows": 4, "bptt": 30, "variable": True, "seed": 1}
    return stream_batches.SegmentSampler(**{**options, **changes})


def epoch(number: int = 0, **changes: Any) -> list[stream_batches.Segment]:
    return [segment for [segment] in segments(**changes).epoch_batches(number)]


def test_segments_cover_the_rows() -> None:
    offsets = set()
    for number in range(20):
        parts = epoch(number, num_tokens=3003)  # 750 columns, 2 tokens left over
        assert [part.start for part in parts] == np.cumsum([0] + [part.length for part in parts])[:-1].tolist()
        assert sum(part.length for part in parts) == 750
        assert all(part.length >= 5 for part in parts)
        assert all(part.rate_scale == part.length / 30 for part in parts[:-1])
        offsets |= {part.offset for part in parts}
    assert offsets == {0, 1, 2}
    lengths = np.array([part.length for part in epoch(num_tokens=2_000_001, bptt=100)[:-1]])
    for usual, share in ((100, 0.95), (50, 0.05)):
        some = lengths[abs(lengths - usual) < 25]
        assert abs(some.mean() - usual + 0.5) < 0.5 and abs(some.std() - 5) < 0.5  # rounded down
        assert abs(len(some) / len(lengths) - share) < 0.01


FIXED = [
    ({"bptt": 100}, [100] * 7 + [50]),
    # Less than five tokens are no segment of their own.
    ({"bptt": 149}, [149] * 5 + [5]),
    ({"bptt": 187}, [187] * 3 + [189]),
    ({"num_tokens": 13}, [3]),
    ({"num_tokens": 13, "bptt": 1}, [1] * 3),
]


@pytest.mark.parametrize(("changes", "lengths"), FIXED)
def test_fixed_segments_and_short_rows(changes: dict[str, int], lengths: list[int]) -> None:
    parts = epoch(variable=False, **changes)
    assert [part.length for part in parts] == lengths and {part.rate_scale for part in parts} == {1.0}


def test_ends_of_epochs() -> None:
    def ends(per_step: int, *counts: int) -> samplers.EpochEnds:
        return samplers.EpochEnds(SimpleNamespace(epoch_batches=lambda number: [None] * counts[number]), per_step)

    assert [step for step in range(1, 10) if step in ends(1, 3, 4, 2)] == [3, 7, 9]
    assert [step for step in range(1, 7) if step in ends(2, 3, 4, 2, 9)] == [2, 4, 5] and ends(2, 3, 4, 2).step(2) == 5
    four = ends(4, 4, 5, 3, 9)
    assert [four.step(0), four.step(1), 1 in four, 2 in four] == [1, 3, True, False]
    refused("3 batches.* 4[.]", four.__contains__, 4)


# ---------------------------------------------------------------------------------------------- evaluation
def small_model(corpus: dict[str, str], tmp_path: Path, architecture: str, *more: str) -> tuple:
    parsed = parse(*flags(corpus, tmp_path, architecture, *more))
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(tmp_path)))
    recipe = train_recurrent.RecurrentRecipe(accelerator, *parsed)
    streams, tokenizer, model = recipe.load_text()
    return accelerator, recipe.data, streams, tokenizer, model


@pytest.mark.parametrize("architecture", ["on_lstm", "prpn", "palm", "awd_lstm"])
def test_perplexity_is_that_of_the_definition(architecture: str, corpus: dict[str, str], tmp_path: Path) -> None:
    accelerator, _, streams, _, model = small_model(corpus, tmp_path, architecture)
    stream = streams.validation
    got = text_recipe.evaluate_stream(accelerator, model, stream, 1, 7)
    ids = torch.from_numpy(stream.ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1]).logits.double()
    nats = -logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum().item()
    assert got == pytest.approx(nats, rel=1e-6)
    losses = text_recipe.text_losses(got, len(stream) - 1, of_characters=False)
    words = sum(len(sentence.words) + 1 for sentence in read_treebank(corpus["valid"]))
    assert losses["tokens"] == words and losses["perplexity"] == pytest.approx(math.exp(nats / words))
    # Rows of a batch are so many streams of their own; that some end early changes nothing.
    rows = text_recipe.StreamRows(stream, 4, complete=True)
    parts = [stream.ids[first : first + rows.length + 1] for first in range(0, len(stream) - 1, rows.length)]
    alone = [make_stream([SentenceCode(part[1:-1].tolist())], 2) for part in parts]
    alone = [dataclasses.replace(one, ids=part) for one, part in zip(alone, parts, strict=True)]
    separate = sum(text_recipe.evaluate_stream(accelerator, model, one, 1, 7) for one in alone)
    assert text_recipe.evaluate_stream(accelerator, model, stream, 4, 7) == pytest.approx(separate, rel=1e-6)
    assert len(parts) == 4 and len(parts[-1]) < len(parts[0])


def test_perplexity_of_sentences_is_that_of_the_definition(corpus: dict[str, str], tmp_path: Path) -> None:
    accelerator, _, streams, tokenizer, model = small_model(corpus, tmp_path, "on_lstm")
    got = text_recipe.evaluate_sentences(accelerator, model, streams.validation, tokenizer.pad_token_id, 3, 50)
    nats = 0.0
    for sentence in read_treebank(corpus["valid"]):
        ids = torch.tensor([[2, *tokenizer(" ".join(sentence.words))["input_ids"], 2]])
        with torch.no_grad():
            logits = model.eval()(ids[:, :-1]).logits.double()
        nats -= logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum().item()
    assert got == pytest.approx(nats, rel=1e-6)


def test_units() -> None:
    assert text_recipe.text_losses(8 * math.log(2), 4, True)["bits_per_character"] == 2
    assert text_recipe.text_losses(1e4, 1, False)["perplexity"] == math.inf


def test_parsed_sentences_are_as_short_as_those_that_are_trained_on(corpus: dict[str, str], tmp_path: Path) -> None:
    config = ("--config", str(PACKAGE_FILES / "configs/prpn_wsj10.yaml"))
    files = ("--train-files", corpus["train"], "--validation-files", corpus["train"])
    _, data, parsing, *_ = parse(*config, *files, "--final-parsing-files", corpus["train"])
    parsing.complete(data)
    short = list(stream_batches.read_words(data.train_files, data))
    words = parsing.treebank(parsing.final_parsing_files, data.reading).words
    assert [list(sentence) for sentence in short] == words and 0 < len(words) < 30
    # Punctuation does not count unless it is kept.
    file = tmp_path / "trees.txt"
    file.write_text("".join(f"(S {'(NN a) ' * count}(. .))\n" for count in (3, 9, 10, 11)))
    parsing.parsing_preprocessing = "none"
    expected = {"remove": [3, 9, 10], "ignore": [4, 10, 11], "keep": [4, 10]}
    for parsing.punctuation, lengths in expected.items():
        assert parsing.treebank([str(file)], data.reading).lengths == lengths


# ---------------------------------------------------------------------------------------------- data
def test_text_and_trees_give_the_same_stream(corpus: dict[str, str], tmp_path: Path) -> None:
    *_, streams, tokenizer, _ = small_model(corpus, tmp_path / "trees", "awd_lstm")
    names = {"train_files": "train", "validation_files": "valid", "test_files": "test"}
    texts = [part for flag, name in names.items() for part in (f"--{flag}", corpus[f"{name}.words"])]
    more = ("--file-format", "text", *texts)
    *_, plain, other, _ = small_model(corpus, tmp_path / "text", "awd_lstm", *more)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert np.array_equal(plain.train.ids, streams.train.ids)
    assert stream_batches.stream_fingerprint(plain.train) == stream_batches.stream_fingerprint(streams.train)
    assert stream_batches.stream_fingerprint(plain.validation) != stream_batches.stream_fingerprint(streams.train)


def test_a_corpus_may_be_a_single_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_batches, "PIECE_LENGTH", 3)
    (tmp_path / "text.txt").write_text("a b c a b c a\n\nb\n", encoding="utf-8")
    file = str(tmp_path / "text.txt")
    for kind, expected in (("words", "a b c a b c a </s> </s> b </s>"), ("characters", "a b c a b c a")):
        options = {"file_format": "text", "tokenizer_type": kind, "tokenizer_vocab_size": None}
        data = text_arguments.StreamDataArguments([file], [file], **options)
        accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(tmp_path)))
        tokenizer = stream_batches.make_stream_tokenizer(accelerator, data, None, tmp_path / kind)
        stream = stream_batches.load_stream(data, [file], tokenizer)
        tokens = tokenizer.convert_ids_to_tokens(stream.ids[1:].tolist())
        assert (" ".join(tokens) if kind == "words" else "".join(tokens[:13])) == expected
        assert tokens.count("</s>") == 3


def test_preprocessing_and_limits(corpus: dict[str, str]) -> None:
    data = text_arguments.StreamDataArguments([corpus["train"]], [corpus["valid"]], preprocessing="ptb-concat")
    words = list(stream_batches.read_words(data.train_files, data))
    assert len(words) == 30 and all(word == "N" or word == word.lower() for sentence in words for word in sentence)
    assert not {",", "."} & {word for sentence in words for word in sentence}
    data.max_sentence_words = 8
    short = list(stream_batches.read_words(data.train_files, data))
    assert short == [sentence for sentence in words if len(sentence) <= 8] and 0 < len(short) < 30
    data.preprocessing, data.max_sentence_words = "words-only", None
    whole = stream_batches.read_words(data.train_files, data)
    assert any(word != word.lower() for sentence in whole for word in sentence)


def test_tags_have_to_tell_words_where_words_are_asked_for(corpus: dict[str, str], tmp_path: Path, caplog) -> None:
    """All files count together: one short file with a strange tag is no reason to stop."""
    (strange := tmp_path / "strange.txt").write_text("(S (AFX ex) (NN cat))")
    paths = [corpus["train"], str(strange)]
    sentences = [sentence.words for sentence in stream_batches.read_trees(paths, "words-only")]
    assert sentences[-1] == ("cat",) and len(sentences) > 1
    assert "words count as punctuation" in caplog.text and "AFX" in caplog.text
    refused("1 of 2 words.*'words-only'.*strange.txt", list, stream_batches.read_trees([str(strange)], "words-only"))
    assert [sentence.words for sentence in stream_batches.read_trees([str(strange)])] == [("ex", "cat")]


# ---------------------------------------------------------------------------------------------- runs
@pytest.mark.usefixtures("warm_verify")
def test_best_weights_are_saved_and_load_without_the_package(corpus: dict[str, str], tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    course = ("--schedule", "adam-asgd", "--averaging-epoch", "1", "--num-train-epochs", "2")
    more = ("--learning-rate", "0.01", "--averaging-learning-rate", "0.1", "--final-report", "True")
    train_recurrent.main(flags(corpus, output_dir, "on_lstm", *course, *more, "--parse-options", "layer=0"))
    found = results_of(output_dir)
    best = min(found["evaluations"], key=lambda item: item["losses"]["nats_per_token"])
    assert best["step"] == found["best_step"] == found["step"]  # the averages of the second epoch
    model = ONLSTMForCausalLM.from_pretrained(output_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(output_dir / "model")
    data = text_arguments.StreamDataArguments([corpus["train"]], [corpus["valid"]])
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(output_dir)))
    stream = stream_batches.load_stream(data, [corpus["valid"]], tokenizer)
    assert text_recipe.evaluate_stream(accelerator, model, stream, 2, 8) == best["losses"]["nats"]
    # The trees are scored by the convention that was named.
    bank = make_treebank(read_treebank(corpus["test"]))
    trees = parse_words(model, tokenizer, bank.words, layer=0)
    scores = unlabeled_f1(trees, bank.spans, bank.lengths, "on-lstm")
    assert found["test"]["trees"]["model"] == scores.numbers()
    report = found["test"]["saved_model"]["trees"]["remove"]["sentence_and_corpus_f1"]
    assert report["model"]["sentence_f1"] == found["test"]["trees"]["model"]["sentence_f1"]


def test_continues_from_a_model_without_clipping(corpus: dict[str, str], tmp_path: Path) -> None:
    more = ("--max-train-steps", "2", "--num-train-epochs", "9", "--max-grad-norm")
    train_recurrent.main(flags(corpus, tmp_path / "wide", "awd_lstm", *more, "1e9"))
    train_recurrent.main(flags(corpus, tmp_path / "none", "awd_lstm", *more, "0"))
    folder = ("--model-name-or-path", str(tmp_path / "none" / "model"), "--config-overrides", "{}")
    train_recurrent.main(flags(corpus, tmp_path / "narrow", "awd_lstm", *more, "1e-9", *folder))
    none, wide, narrow = (results_of(tmp_path / name) for name in ("none", "wide", "narrow"))
    assert none["train"] == wide["train"] and none["evaluations"] == wide["evaluations"] and none["step"] == 2
    best = next(item for item in none["evaluations"] if item["step"] == none["best_step"])
    first, *_, last = (item["losses"] for item in narrow["evaluations"])
    assert first == best["losses"] and last["nats"] == pytest.approx(first["nats"], rel=1e-6)
    before, *_, after = (item["losses"]["nats"] for item in none["evaluations"])
    assert after != pytest.approx(before, rel=1e-3)


# ---------------------------------------------------------------------------------------------- arguments
CONFLICTS = [
    ("on_lstm", ("--tree-supervision",), "--tree-supervision.*supervised_layers"),
    ("palm", ("--config-overrides", "vocab_size=9"), "vocab_size"),
    ("palm", ("--gradient-accumulation-steps", "2"), "--gradient-accumulation-steps is 2"),
    ("palm", ("--per-device-train-batch-size", "999"), "999 rows"),
    ("palm", ("--tokenizer-name", "{model}"), "pad_token"),
    ("awd_lstm", ("--parse-options", "method=attention"), "parse-options.*awd_lstm"),
    ("prpn", ("--batching", "sentences", "--gradient-accumulation-steps", "99"), " 99[.]"),
    # Otherwise, these would show after the training.
    ("palm", ("--parse-options", "decoder=biased"), "decoder.*method"),
    ("on_lstm", ("--parse-options", "layer=7"), "Layer 7"),
    ("prpn", ("--final-parsing-files", "{words}"), "test.words.txt"),
    ("prpn", ("--test-batch-size", "999"), "test text: .*999 rows"),
    ("prpn", ("--file-format", "text", "{files}", "{blank}", "--batching", "sentences"), "test text"),
]


@pytest.mark.parametrize(("architecture", "more", "message"), CONFLICTS)
def test_what_does_not_go_together_is_refused(architecture: str, more: tuple[str, ...], message: str, corpus, tmp_path):
    if "{model}" in more:
        other = word_tokenizer([["a"]])
        other.pad_token = None
        other.save_pretrained(tmp_path / "model")
        more = tuple(item.replace("{model}", str(tmp_path / "model")) for item in more)
    (tmp_path / "blank.txt").write_text("\n\n")
    files = ("--train-files", corpus["train.words"], "--validation-files", corpus["valid.words"], "--test-files")
    given = {"{words}": (corpus["test.words"],), "{files}": files, "{blank}": (str(tmp_path / "blank.txt"),)}
    more = tuple(part for item in more for part in given.get(item, (item,)))
    with pytest.raises(ValueError, match=message):
        train_recurrent.main(flags(corpus, tmp_path / "out", architecture, "--max-train-steps", "2", *more))
    assert not (tmp_path / "out" / "all_results.json").exists()


def test_continues_from_a_model_with_trees_or_without(corpus: dict[str, str], tmp_path: Path) -> None:
    *_, tokenizer, model = small_model(corpus, tmp_path, "palm")
    model.save_pretrained(tmp_path / "palm")
    for architecture, message in (("awd_lstm", "architecture is 'awd_lstm'"), ("prpn", "type 'palm', not 'prpn'")):
        arguments = text_arguments.RecurrentModelArguments(architecture, model_name_or_path=str(tmp_path / "palm"))
        refused(message, train_recurrent.RecurrentRecipe(None, arguments, None, None, None, None).make_model, tokenizer)


def test_text_that_is_trees_is_refused(corpus: dict[str, str], tmp_path: Path) -> None:
    def text(content: str) -> text_arguments.StreamDataArguments:
        (tmp_path / "text.txt").write_text(content, encoding="utf-8")
        files = ([corpus["train.words"]], [str(tmp_path / "text.txt")])
        return text_arguments.StreamDataArguments(*files, file_format="text")

    for content in ("\n(S (NN a) (VB b))\n", "( (S\n   (NN a)\n   (VB b)))\n", "(S (NN New York) (VB b))\nx\n"):
        refused("--file-format treebank", text, content)
    for content in ("( laughter ) yes\n", "(laughter continues)\n", "(a (b\n", "\n", "a (S (NN a))\n"):
        text(content)


def test_a_tokenizer_of_other_words_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(tmp_path)))

    def tokenizer(text: str, path: Path = file, **options: Any) -> Any:
        path.write_text(text, encoding="utf-8")
        data = text_arguments.StreamDataArguments([str(path)], [str(path)], file_format="text", **options)
        return stream_batches.make_stream_tokenizer(accelerator, data, None, tmp_path)

    vocabulary = tokenizer("a b c\nd\n").get_vocab()
    assert tokenizer("a  b c\nd\n", tmp_path / "moved.txt").get_vocab() == vocabulary
    for text in ("a b c\ne\n", "a b\nc d\n"):
        refused("made with {'training_words'", tokenizer, text)
    refused("made with {'max_sentence_words': None", tokenizer, "a b c\nd\n", max_sentence_words=2)


def test_leaves_of_several_words_are_read_on_demand(tmp_path: Path) -> None:
    file = str(tmp_path / "trees.txt")
    Path(file).write_text("(S (NP (NN New York)) (VP (VBZ sleeps)))\n", encoding="utf-8")
    data = text_arguments.StreamDataArguments([file], [file], split_leaves=True)
    parsing = text_arguments.ParsingArguments(punctuation="keep")
    parsing.complete(data)
    refused(r"trees.txt:1: .*split_leaves=True", parsing.treebank, parsing.parsing_files, {})
    assert parsing.treebank(parsing.parsing_files, data.reading).words == [["New", "York", "sleeps"]]
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(tmp_path)))
    tokenizer = stream_batches.make_stream_tokenizer(accelerator, data, None, tmp_path)
    for gold in ("spans", "distances", None):
        stream = stream_batches.load_stream(data, [file], tokenizer, gold)
        assert len(stream) == 5 and (gold != "spans" or stream.spans.tolist() == [[1, 3]])


@pytest.mark.parametrize("role", ["train", "validation"])
def test_an_empty_file_is_named(role: str, tmp_path: Path) -> None:
    files = {"train": tmp_path / "full.txt", "validation": tmp_path / "full.txt", role: tmp_path / "empty.txt"}
    (tmp_path / "full.txt").write_text("the people agree\n" * 20)
    (tmp_path / "empty.txt").write_text("")
    flags = [text for name, file in files.items() for text in (f"--{name}_files", str(file))]
    with pytest.raises(ValueError, match=r"empty\.txt: there are no .*. Name other files"):
        train_recurrent.main([*flags, "--file-format", "text", "--output-dir", str(tmp_path / "out")])
