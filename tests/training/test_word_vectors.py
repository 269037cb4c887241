"""Word vectors with which a model begins: against sums by hand, and runs that begin so."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_synlm.data.gold_trees import which_joined
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer
from hf_synlm.training.tasks import treebank_recipe, word_vectors
from hf_synlm.training.tasks.word_vectors import take_word_vectors
from tests.helpers.refusals import refused
from tests.helpers.training_runs import TINY, cut_off, sample_files

SENTENCES = [
    (
        ("She", "did", "n't", "-LRB-", "ever", "-RRB-", "go", "."),
        (True, False, True, False, True, True, False, True),
    ),
    (("``", "laughter", "''", "did", "."), (True, True, True, False, True)),
]
TRANSFORMER = "hidden_size=12,num_hidden_layers=1,num_attention_heads=2,intermediate_size=8"
TEXTS = ["She didn't (ever) go.", '"laughter" did.']
SPELLED = {"-LRB-": "(", "-RRB-": ")", "``": '"', "''": '"'}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A small GPT-2 that reads bytes and some pieces."""
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(TEXTS * 9, vocab_size=275, min_frequency=2, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=12, n_layer=1, n_head=2))
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


def means_by_hand(tokenizer: PreTrainedTokenizerFast, source: str) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
    other = PreTrainedTokenizerFast.from_pretrained(source)
    vectors = GPT2LMHeadModel.from_pretrained(source).get_input_embeddings().weight.detach()
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for (words, _), text in zip(SENTENCES, TEXTS, strict=True):
        batch = other(text, return_offsets_mapping=True)
        spans = zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        under = {k: piece for piece, span in spans for k in range(*span)}
        letters = iter([vectors[under[k]] for k, letter in enumerate(text) if letter != " "])
        for word in words:
            batch = tokenizer(word, add_special_tokens=False, return_offsets_mapping=True)
            of_word = [next(letters) for _ in SPELLED.get(word, word)]
            of_word += [of_word[-1]] * (len(word) - len(of_word))
            taken = 0
            for piece, (_, end) in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
                found[piece] += of_word[taken:end]
                taken = end
    return {k: torch.stack(v).mean(0) for k, v in found.items() if v}, {k: len(v) for k, v in found.items()}


@pytest.mark.parametrize(("size", "at_once"), [(5, 9), (12, 2), (16, 1)])
def test_pieces_begin_with_the_means_of_their_letters(
    size: int, at_once: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_vectors, "_AT_ONCE", at_once)
    tokenizer = subword_tokenizer([words for words, _ in SENTENCES], 40, min_frequency=1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=size, n_layer=1, n_head=1))
    before = model.get_input_embeddings().weight.detach().clone()
    means, numbers = means_by_hand(tokenizer, source)
    assert take_word_vectors(model, tokenizer, source, SENTENCES) == len(means)

    rows = sorted(means)
    rest = [k for k in range(len(tokenizer)) if k not in means]
    after = model.get_input_embeddings().weight.detach()
    assert rest and torch.equal(after[rest], before[rest])
    torch.testing.assert_close(after[rows].std(), before[rows].std())
    weights = torch.tensor([numbers[k] for k in rows]).sqrt()
    centered = torch.stack([means[k] for k in rows])
    centered -= (weights[:, None] * centered).sum(0) / weights.sum()
    # The best approximation of this rank keeps the products of the rows, up to the scale.
    left, values, right = torch.linalg.svd(weights.sqrt()[:, None] * centered, full_matrices=False)
    kept = (left[:, :size] * values[:size]) @ right[:size] / weights.sqrt()[:, None]
    products, expected = after[rows] @ after[rows].T, kept @ kept.T
    torch.testing.assert_close(products / products.trace(), expected / expected.trace(), rtol=1e-3, atol=1e-5)


def test_a_model_of_ordinary_text_reads_it_as_the_source_does(source: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    vectors = GPT2LMHeadModel.from_pretrained(source).get_input_embeddings().weight
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=12, n_layer=1, n_head=1))
    model.config.text_style = "natural"
    used = sorted({piece for ids in tokenizer(TEXTS)["input_ids"] for piece in ids})
    assert take_word_vectors(model, tokenizer, source, SENTENCES) == len(used)
    found, wanted = (torch.pdist(table[used]) for table in (model.get_input_embeddings().weight, vectors))
    torch.testing.assert_close(found / found.norm(), wanted / wanted.norm())


@pytest.mark.parametrize(
    ("script", "architecture", "size"),
    [
        ("train_rnng", "rnng", TINY["rnng"]),
        ("train_rnng", "lstm", TINY["rnng"]),
        ("train_rnng", "gpt2", "n_embd=12,n_layer=1,n_head=2"),
        ("train_pushdown", "pushdown", TRANSFORMER),
        ("train_tree_lm", "tree_lm", TRANSFORMER),
    ],
)
def test_a_run_begins_with_word_vectors(
    script: str, architecture: str, size: str, source: str, program: Callable[..., dict], tmp_path: Path
) -> None:
    flags = [*small_run(tmp_path), "--architecture", architecture, "--config-overrides", size]
    without = program(script, [*flags, "--output-dir", str(tmp_path / "without")])
    begun = program(script, [*flags, "--word-vectors", source, "--output-dir", str(tmp_path / "with")])
    assert f"of 200 tokens begin with word vectors of {source}" in begun["stdout"]
    first, other = (run["evaluations"][0] for run in (begun, without))
    assert first["step"] == other["step"] == 0 and first["losses"] != other["losses"]


def test_a_run_with_word_vectors_resumes(
    source: str, program: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the vectors already: the source is not read again, and its folder may be elsewhere."""
    flags, read = [*small_run(tmp_path), "--config-overrides", TINY["rnng"]], []

    def spy(model, tokenizer, name, sentences):
        read.extend(sentences)
        return take_word_vectors(model, tokenizer, name, read)

    monkeypatch.setattr(treebank_recipe, "take_word_vectors", spy)
    whole = program("train_rnng", [*flags, "--word-vectors", source, "--output-dir", str(tmp_path / "whole")])
    trees = read_treebank(flags[1])
    assert read == [(tree.words, which_joined(tree)) for tree in trees] and any(any(marks[1:]) for _, marks in read)
    cut_off(tmp_path / "whole", tmp_path / "cut", 2)
    again = [*flags, "--output-dir", str(tmp_path / "cut")]
    refused("word_vectors 'source'", program, "train_rnng", again)
    monkeypatch.setattr(treebank_recipe, "take_word_vectors", None)
    (tmp_path / "moved").mkdir()
    moved = str(Path(source).rename(tmp_path / "moved" / "source"))
    resumed = program("train_rnng", [*again, "--word-vectors", f"{moved}/"])
    assert resumed["evaluations"][-1]["losses"] == whole["evaluations"][-1]["losses"]
    assert "word vectors began with those of source; " in (tmp_path / "cut" / "model" / "README.md").read_text()


def small_run(folder: Path) -> list[str]:
    """Flags of a run of four steps on trees, with 200 pieces."""
    files = sample_files(folder, "trees", train=40, valid=8)
    flags = ["--train-files", files["train"], "--validation-files", files["valid"]]
    flags += ["--tokenizer-type", "bpe", "--tokenizer-vocab-size", "200", "--per-device-train-batch-size", "4"]
    return [*flags, "--max-train-steps", "4", "--checkpointing-steps", "2"]


def test_sources_without_vectors_of_the_words_are_refused(source: str, tmp_path: Path) -> None:
    tokenizer = subword_tokenizer([words for words, _ in SENTENCES], 40, min_frequency=1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=4, n_layer=1, n_head=1))
    word_tokenizer([["\u4f60", "\u597d"]]).save_pretrained(source)  # to it, all other words are one unknown word
    refused("has no vectors for the words", take_word_vectors, model, tokenizer, source, SENTENCES)
    cards = Path(__file__).parents[2] / "model_cards"
    grammar, adapter = str(cards / "pcfg-mini"), str(cards / "tree-lm-smollm2")
    refused("PCFGModel has no word vectors", take_word_vectors, model, tokenizer, grammar, SENTENCES)
    refused("is an adapter without word vectors", take_word_vectors, model, tokenizer, adapter, SENTENCES)
    file = Path(source) / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if "wte" not in name}
    save_file(weights, file, {"format": "pt"})
    refused("its files lack the word vectors", take_word_vectors, model, tokenizer, source, SENTENCES)


def test_word_vectors_are_refused_beside_a_trained_model(
    source: str, program: Callable[..., dict], tmp_path: Path
) -> None:
    flags = ["--word-vectors", source, "--output-dir", "x"]
    rnng = str(Path(__file__).parents[2] / "model_cards" / "rnng-tiny")
    refused("has word vectors of its own", program, "train_rnng", [*flags, "--model-name-or-path", rnng])
    flags = ["--word-vectors", source, "--output-dir", "x", "--backbone", source]
    refused("a backbone has word vectors of its own", program, "train_tree_lm", flags)
    empty = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1))
    empty.save_pretrained(tmp_path / "bare")
    for name, message in ((str(tmp_path / "bare"), "holds no tokenizer"), ("no/where", "no/where")):
        refused(message, program, "train_rnng", ["--word-vectors", name, "--output-dir", "x"])
