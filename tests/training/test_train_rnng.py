"""Training of RNNG and its baselines: batches, the best model, evaluation, and what is refused."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer

from hf_synlm import LSTMForCausalLM, TreeLMForCausalLM
from hf_synlm.cli import main
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.training.arguments import base as run_arguments
from hf_synlm.training.arguments.treebank import EvaluationArguments, RNNGModelArguments
from hf_synlm.training.engine import run as common, samplers
from hf_synlm.training.engine.export import load_step
from hf_synlm.training.programs import train_rnng
from hf_synlm.training.tasks.tree_evaluation import spread
from tests.helpers.commands import fail, run as run_command
from tests.helpers.refusals import refused
from tests.helpers.training_runs import TINY, cut_off, sample_files

SMALL = TINY["rnng"]
# Beams of the model that is saved: the report uses them, too.
NARROW = "scoring_num_beams=2,action_beam_size=6"
LENGTHS = np.random.default_rng(0).integers(3, 60, size=301)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A few trees of the embedded treebank; short ones for the test, which searches."""
    files = sample_files(tmp_path_factory.mktemp("trees"), "trees", train=40, valid=12, test=80)
    shortest = sorted(Path(files["test"]).read_text(encoding="utf-8").splitlines(), key=len)[6:12]
    Path(files["test"]).write_text("\n".join(shortest), encoding="utf-8")
    return files


def flags_of(corpus: dict[str, str], output_dir: Path, architecture: str, *flags: str) -> list[str]:
    return [
        *("--config", f"{architecture}_tiny", "--config-overrides", SMALL),
        *("--output-dir", str(output_dir), "--overwrite-output-dir", "False", "--train-files", corpus["train"]),
        *("--validation-files", corpus["valid"], "--test-files", corpus["test"], "--per-device-train-batch-size", "4"),
        *("--max-batch-actions", "300", "--batch-group-size", "16", "--logging-steps", "1", *flags),
    ]


@pytest.fixture
def run(corpus: dict[str, str], program: Callable[..., dict]) -> Callable[..., dict]:
    """Runs the program in this process; its results and what it printed."""
    return lambda output_dir, *flags: program("train_rnng", flags_of(corpus, output_dir, *flags))


def parse(*flags: str) -> tuple:
    return run_arguments.parse_arguments(train_rnng.RNNGRecipe.parts.values(), ("--output-dir", "x", *flags))


# ---------------------------------------------------------------------------------------------- batches
def sampler(**changes: int) -> samplers.PaddedBatchSampler:
    options = {"max_batch_size": 8, "max_padded_length": 200, "group_size": 64, "seed": 3}
    return samplers.PaddedBatchSampler(LENGTHS, **{**options, **changes})


def first(sampler: samplers.PaddedBatchSampler, count: int) -> list[list[int]]:
    batches = iter(sampler)
    return [next(batches) for _ in range(count)]


def test_an_epoch_reads_every_sentence_once_within_the_bounds() -> None:
    batches = sampler().epoch_batches(0)
    assert Counter(k for batch in batches for k in batch) == Counter(range(len(LENGTHS)))
    for batch in sampler(max_padded_length=30).epoch_batches(0):  # a longer sentence is a batch of its own
        assert len(batch) == 1 or len(batch) * LENGTHS[batch].max() <= 30
    sizes = [len(batch) for batch in batches]
    padded = [len(batch) * LENGTHS[batch].max() for batch in batches]
    assert max(sizes) == 8 and max(padded) <= 200
    # Batches are of similar length, and they are full: one more of their group would not fit (but at a group's end).
    assert np.mean([np.ptp(LENGTHS[batch]) for batch in batches]) < 12
    full = [
        size == 8 or bound + LENGTHS[batch].max() > 150
        for size, bound, batch in zip(sizes, padded, batches, strict=True)
    ]
    assert sum(full) >= len(full) - math.ceil(len(LENGTHS) / 64)


def test_batches_depend_on_seed_and_number_only() -> None:
    per_epoch = len(sampler().epoch_batches(0))
    count = 2 * per_epoch + 5
    whole = first(sampler(), count)
    assert whole == first(sampler(), count)
    assert whole[:per_epoch] == sampler().epoch_batches(0) != sampler().epoch_batches(1)
    assert whole[:per_epoch] != first(sampler(seed=4), per_epoch)
    for consumed in (1, per_epoch - 1, per_epoch + 7):
        assert first(sampler(consumed=consumed), count - consumed) == whole[consumed:]
    shares = [first(sampler(rank=rank, world_size=3), count // 3) for rank in range(3)]
    together = [batch for step in zip(*shares, strict=True) for batch in step]
    assert together == whole[: len(together)]
    assert sampler().consumed_in(2) == sum(len(sampler().epoch_batches(epoch)) for epoch in range(2))
    refused("empty", samplers.PaddedBatchSampler, [], 1, 1, 1, 0)


def test_evaluation_batches_hold_every_sentence_once() -> None:
    batches = samplers.padded_batches(LENGTHS, 16, 300)
    assert sorted(k for batch in batches for k in batch) == list(range(len(LENGTHS)))
    assert all(len(batch) <= 16 and len(batch) * LENGTHS[batch].max() <= 300 for batch in batches)


# ---------------------------------------------------------------------------------------------- runs
def perplexities(results: dict) -> set[frozenset[str]]:
    """Names of the perplexities of training, evaluation and test."""
    rows = (*results["train"], results["evaluations"][0]["losses"], results["test"]["losses"])
    return {frozenset(name.removesuffix("perplexity") for name in row if "perplexity" in name) for row in rows}


@pytest.mark.usefixtures("warm_verify")
@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_search_and_report_of_the_saved_model(system: str, run: Callable[..., dict], tmp_path: Path) -> None:
    flags = ("--config-overrides", f"{SMALL},{NARROW},transition_system={system}", "--max-train-steps", "5")
    flags = (*flags, "--checkpointing-steps", "5")
    flags = (*flags, "--evaluation-steps", "3", "--search-sentences", "3", "--num-beams", "2")
    flags = (*flags, "--action-beam-size", "7", "--tokenizer-type", "bpe", "--tokenizer-vocab-size", "150")
    results = run(tmp_path / "out", "rnng", *flags)
    first, *later = results["evaluations"]
    assert "search" not in first and len(later) == 2
    assert later[-1]["losses"]["nats"] < first["losses"]["nats"] and results["sentences"] >= 10
    assert perplexities(results) == {frozenset(("", "action_", "token_"))}
    assert "step 0: no sentence is parsed with an untrained model" in results["stdout"]
    for search, count in [(item["search"], 3) for item in later] + [(results["test"]["search"], 6)]:
        assert search["punctuation_by"] == "tag"
        assert search["num_sentences"] == count and math.isfinite(search["word_perplexity"])
        assert 0 <= search["labeled_f1"] <= search["unlabeled_f1"] <= 100
        assert search["beam"] == {"num_beams": 2, "action_beam_size": 7, "fast_track_size": 1}
    assert "computes the same without hf_synlm." in results["stdout"]
    report = results["test"]["saved_model"]["trees"]["ignore"]["sentence_and_corpus_f1"]
    assert {"search (beams 2 and 7)", "right", "random"} <= set(report)
    # The process without the package finds the same trees.
    assert report["search (beams 2 and 7)"]["sentence_f1"] == results["test"]["search"]["induction_sentence_f1"]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model").text_style == "treebank"
    # The last checkpoint is the best one, and the output folder stands for the model.
    assert results["best_step"] == 5
    assert main(["export", str(tmp_path / "out" / "step_5"), "--out", str(tmp_path / "exported")]) == 0
    (exported, read), (whole, own) = (load_pretrained(str(tmp_path / name)) for name in ("exported", "out"))
    assert read.get_vocab() == own.get_vocab() and exported.config.to_diff_dict() == whole.config.to_diff_dict()
    torch.testing.assert_close(exported.state_dict(), whole.state_dict(), rtol=0, atol=0)
    # Checkpoints of earlier versions have their tokenizer beside them; no other one is taken.
    kept, beside = tmp_path / "out" / "step_5" / "tokenizer.json", tmp_path / "out" / "tokenizer" / "tokenizer.json"
    wrong = json.loads(kept.read_text())
    vocab = wrong["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    kept.unlink()
    assert load_step(tmp_path / "out" / "step_5")[1].get_vocab() == own.get_vocab()
    beside.write_text(json.dumps(wrong))
    refused("holds another tokenizer than that of the run", load_step, tmp_path / "out" / "step_5")
    weights = tmp_path / "out" / "step_5" / "model.safetensors"
    save_file({**load_file(weights), "score.weight": torch.zeros(2)}, weights)
    refused("something else than a language model", load_step, tmp_path / "out" / "step_5")
    weights.write_bytes(weights.read_bytes()[:-9])
    refused("step_5' cannot be loaded as a model: SafetensorError", load_step, tmp_path / "out" / "step_5")


def test_beams_that_do_not_fit_are_refused_before_training(run: Callable[..., dict], tmp_path: Path) -> None:
    flags = ("--config-overrides", f"{SMALL},{NARROW}", "--max-train-steps", "2", "--evaluation-steps", "0")
    wide = (*flags, "--num-beams", "120")
    refused("--action-beam-size is 20, .*word beam of 120", run, tmp_path, "rnng", *wide, "--action-beam-size", "20")
    assert not list(tmp_path.glob("step_*"))
    config = transformers.AutoConfig.for_model("rnng", action_beam_size=6)
    assert EvaluationArguments(num_beams=50).beam(config)["action_beam_size"] == 50


@pytest.fixture(scope="module")
def decoder(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small GPT-2 whose tokenizer has no padding token and marks where words begin, not where they end."""
    folder = tmp_path_factory.mktemp("decoder") / "gpt2"
    backend = ByteLevelBPETokenizer()
    backend.train([corpus["train"]], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, **end).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    return str(folder)


def backbone_flags(corpus: dict[str, str], decoder: str, output_dir: Path, *flags: str) -> list[str]:
    given = [NARROW if flag == SMALL else flag for flag in flags_of(corpus, output_dir, "tree_lm")]
    return [*given[2:], "--backbone", decoder, *flags]  # without the configuration, whose sizes are another model's


@pytest.mark.usefixtures("warm_verify")
def test_a_decoder_becomes_a_tree_lm(corpus: dict[str, str], decoder: str, program, tmp_path: Path) -> None:
    """With its weights and tokenizer."""
    flags = backbone_flags(corpus, decoder, tmp_path / "out", "--max-train-steps", "2", "--final-report")
    results = program("train_tree_lm", flags)
    assert "computes the same without hf_synlm." in results["stdout"]
    assert results["test"]["search"]["num_sentences"] == 6
    model = TreeLMForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.config.backbone_config.model_type == "gpt2" and model.config.pad_token_id == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    (sentence,) = parse_sentences(model, tokenizer, ["unbelievable economies"])
    assert sentence.words == ("unbelievable", "economies")


@pytest.mark.usefixtures("warm_verify")
def test_lora_on_a_decoder_gives_an_adapter(corpus, decoder: str, program, capsys, tmp_path: Path) -> None:
    """Which needs the backbone and nothing else; the run resumes as it was."""
    lora = ("--lora-r", "2", "--backbone-name", "owner/gpt2", "--max-train-steps", "3", "--checkpointing-steps", "2")
    flags = backbone_flags(corpus, decoder, tmp_path / "whole", *lora, "--final-report")
    whole = program("train_tree_lm", flags)
    assert "computes the same without hf_synlm." in whole["stdout"]
    folder = tmp_path / "whole" / "model"
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 50_000
    assert decoder not in (folder / "config.json").read_text() and "owner/gpt2" in (folder / "README.md").read_text()
    cut_off(tmp_path / "whole", tmp_path / "cut", 2)
    flags = backbone_flags(corpus, decoder, tmp_path / "cut", *lora, "--resume-from-checkpoint", "latest")
    refused("lora_alpha", program, "train_tree_lm", [*flags, "--lora-alpha", "3"])
    assert program("train_tree_lm", flags)["evaluations"][-1] == whole["evaluations"][-1]
    more = ("--model-name-or-path", str(folder), "--max-train-steps", "1")
    for name, rank in (("further", ("--lora-r", "2")), ("merged", ())):
        found = program("train_tree_lm", backbone_flags(corpus, decoder, tmp_path / name, *more, *rank))
        assert found["evaluations"][0]["losses"]["nats"] == pytest.approx(whole["evaluations"][-1]["losses"]["nats"])
        assert (tmp_path / name / "model" / "adapter").exists() == bool(rank)
    text = tmp_path / "text.txt"
    text.write_text("unbelievable economies\n")
    assert "--backbone" in fail(capsys, "parse", text, "--model", folder)
    assert "unbelievable" in run_command(capsys, "parse", text, "--model", folder, "--backbone", decoder)
    assert "--backbone" in fail(capsys, "parse", text, "--model", decoder, "--backbone", decoder)
    for flags, named in (
        (["--lora-alpha", "3"], "lora-alpha"),
        ([*lora, "--lora-target-modules", "w"], "'w'"),
        ([*more, "--lora-r", "3"], "Pass --lora-r 2"),
        ([*more, "--lora-r", "2", "--lora-alpha", "3"], "adapter decides"),
        (["--model-name-or-path", str(tmp_path / "merged" / "model"), "--lora-r", "2"], "no LoRA. Leave --lora-r out"),
    ):
        refused(named, program, "train_tree_lm", backbone_flags(corpus, decoder, tmp_path / "wrong", *flags))


@pytest.mark.usefixtures("warm_verify")
def test_treebanks_with_other_tags(run: Callable[..., dict], tmp_path: Path) -> None:
    """Their tags tell no punctuation: the report says so before training, and what goes on without."""
    trees = tmp_path / "trees.txt"
    trees.write_text("(S (NP (Nab 他)) (VP (VC2 看) (NP (Nab 書))))\n" * 8)
    files = [part for name in ("train", "validation", "test") for part in (f"--{name}_files", str(trees))]
    flags = (*files, "--max-train-steps", "2", "--num-beams", "2", "--action-beam-size", "4")
    refused("--report-punctuation keep", run, tmp_path / "refused", "rnng", *flags)
    assert not list((tmp_path / "refused").glob("step_*")) and not (tmp_path / "refused/model").exists()
    results = run(tmp_path / "out", "rnng", *flags, "--report-punctuation", "keep")
    assert set(results["test"]["saved_model"]["trees"]) == {"keep"}
    assert 0 <= results["test"]["search"]["induction_sentence_f1"] <= 100
    assert results["test"]["search"]["punctuation_by"] == "form"


def test_early_stopping_keeps_and_saves_the_best_model(run: Callable[..., dict], corpus: dict[str, str], tmp_path):
    # A learning rate that ruins the model at once: the untrained model stays the best.
    flags = "--learning-rate 30 --lr-scheduler-type constant --warmup-ratio 0 --evaluation-steps 1 "
    flags += "--early-stopping-patience 2 --num-train-epochs 0 --max-train-steps 7"
    results = run(tmp_path / "out", "lstm", *flags.split())
    assert (results["step"], results["best_step"], len(results["evaluations"])) == (2, 0, 3)
    assert "no better evaluation" in results["stdout"]
    assert perplexities(results) == {frozenset(("word_", "token_"))}
    assert [path.name for path in (tmp_path / "out").glob("best_*")] == ["best_0"]
    model = LSTMForCausalLM.from_pretrained(tmp_path / "out" / "model")
    nats = results["evaluations"][0]["losses"]["nats"]
    assert nats == pytest.approx(_nats(model, tmp_path / "out", corpus), rel=1e-5)


def test_a_gpt2_learns_the_same_words_after_a_begin_token(corpus: dict[str, str], tmp_path: Path, program) -> None:
    words = (tree.words for tree in read_treebank(corpus["train"]))
    subword_tokenizer(words, 400).save_pretrained(tmp_path / "tokenizer")
    flags = f"--config gpt2_free --config-overrides n_embd=8,n_layer=1,n_head=2 --tokenizer-name {tmp_path}/tokenizer "
    flags += f"--train-files {corpus['train']} --validation-files {corpus['valid']} --output-dir {tmp_path}/out "
    flags += "--max-batch-actions 600 --num-train-epochs 1 --dataloader-num-workers 0"
    results = program("train_rnng", flags.split())
    assert results["step"] > 3
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "model")
    losses = results["evaluations"][-1]["losses"]
    assert losses["nats"] == pytest.approx(_nats(model, tmp_path / "out", corpus), rel=1e-5)
    num_words = sum(len(tree.words) for tree in read_treebank(corpus["valid"]))
    assert losses["word_perplexity"] == pytest.approx(math.exp(losses["nats"] / num_words), rel=1e-5)
    refused("from scratch", parse, "--architecture", "gpt2", "--model-preset", "gpt2-small")


def _nats(model: LSTMForCausalLM | transformers.GPT2LMHeadModel, output_dir: Path, corpus: dict[str, str]) -> float:
    """Likelihood of the validation words, sentence by sentence, by the definition."""
    tokenizer, total = transformers.AutoTokenizer.from_pretrained(output_dir / "model"), 0.0
    for sentence in read_treebank(corpus["valid"]):
        ids = tokenizer(" ".join(sentence.words), return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model.eval()(torch.nn.functional.pad(ids, (1, 0), value=model.config.bos_token_id)).logits
        total -= logits[0, :-1].log_softmax(-1).gather(1, ids[0, :, None]).sum().item()
    return total


# ---------------------------------------------------------------------------------------------- evaluation
def small_batch(accelerator: Accelerator, corpus: dict[str, str], tmp_path: Path, **config: str) -> tuple:
    """A small untrained RNNG with encoded trees."""
    fields = ",".join(f"{name}={value}" for name, value in {"embedding_size": 8, "hidden_size": 8, **config}.items())
    files = ("--train-files", corpus["train"], "--validation-files", corpus["valid"], "--config-overrides", fields)
    recipe = train_rnng.RNNGRecipe(accelerator, *parse(*files, "--output-dir", str(tmp_path)))
    return recipe, recipe.load()


@pytest.mark.parametrize("normalization", ["batch", "sum", "action", "token"])
def test_perplexities_are_those_of_the_definition(normalization: str, corpus: dict[str, str], tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", corpus["cache"])
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(tmp_path)))
    recipe, model = small_batch(accelerator, corpus, tmp_path, loss_normalization=normalization)
    held_out = recipe.splits.validation
    got = recipe.given_trees(model, held_out)
    nats, action_nats, num_words, num_actions = 0.0, 0.0, 0, 0
    model.eval()
    for index in range(len(held_out)):
        item = held_out[index]
        ids, actions = torch.tensor([item["input_ids"]]), torch.tensor([item["actions"]])
        output = model(ids, actions=actions, output_logits=True)
        nats -= output.joint_log_prob.item()
        logs = output.action_logits.log_softmax(-1)
        action_nats -= logs.gather(2, actions[..., None]).sum().item()
        num_words += len(held_out.sentence(index).words)
        num_actions += len(item["actions"])
    assert got["nats"] == pytest.approx(nats, rel=1e-5)
    assert got["nats_per_sentence"] == pytest.approx(nats / 12, rel=1e-5)
    assert got["action_perplexity"] == pytest.approx(math.exp(action_nats / num_actions), rel=1e-4)
    assert got["token_perplexity"] == pytest.approx(math.exp((nats - action_nats) / num_words), rel=1e-4)
    assert got["perplexity"] == pytest.approx(math.exp(nats / (num_words + num_actions)), rel=1e-4)


@pytest.mark.parametrize(("count", "limit", "expected"), [(5, None, [0, 1, 2, 3, 4]), (9, 3, [0, 4, 8]), (3, 0, [])])
def test_sentences_are_spread(count: int, limit: int | None, expected: list[int]) -> None:
    assert spread(count, limit) == expected


# ---------------------------------------------------------------------------------------------- arguments
def test_baselines_have_no_trees_to_search() -> None:
    for flag in ("search-sentences", "num-beams", "action-beam-size"):
        for baseline in ("lstm", "gpt2"):
            recipe = train_rnng.RNNGRecipe(Accelerator(cpu=True), *parse("--architecture", baseline, f"--{flag}", "3"))
            refused(f"{flag} is 3, but {baseline}", recipe.check)


def test_overrides_that_the_data_decide_are_refused() -> None:
    tokenizer = word_tokenizer([["a"]])

    def make(**fields: int) -> transformers.PreTrainedModel:
        arguments = RNNGModelArguments(config_overrides={"embedding_size": 8, "hidden_size": 8, **fields})
        recipe = train_rnng.RNNGRecipe(Accelerator(cpu=True), arguments, None, None, None)
        recipe.tokenizer = tokenizer
        return recipe.make_model(["NP", "S"])

    config = make().config
    assert (config.vocab_size, config.nonterminals, config.subwords) == (len(tokenizer), ["NP", "S"], False)
    for field in ("vocab_size", "nonterminals", "subwords", "hidden"):
        refused(field, make, **{field: 3})
