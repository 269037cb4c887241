"""The span parser: its chart against brute force, padding and batches, adapters, training, silver trees."""

import json
import shutil
from functools import cache
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch.nn import functional as F

from hf_synlm import SpanParserConfig, SpanParserForTokenClassification
from hf_synlm.cli import main
from hf_synlm.core.backbone_adapter import linear_layers
from hf_synlm.core.binary_trees import BinaryTrees
from hf_synlm.data.collate import encode_words
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.treebank import parse_treebank, read_treebank
from hf_synlm.evaluation.text.words import treebank_words
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.hub.verify import verify_export
from hf_synlm.training.programs import train_span_parser
from hf_synlm.training.tasks import span_batches
from tests.helpers.commands import run
from tests.helpers.search_models import padded

CARDS = Path(__file__).resolve().parents[3] / "model_cards"
LABELS, TAGS = ["NP", "S", "S VP"], ["N", "V"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A folder with a tiny encoder and its tokenizer of pieces."""
    folder = tmp_path_factory.mktemp("encoder")
    pieces = '[PAD] [UNK] [CLS] [SEP] ( ) . " not ##s ##ing'.split()
    pieces += [*ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    backend = Tokenizer(models.WordPiece({piece: k for k, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    transformers.BertModel(
        transformers.BertConfig(vocab_size=len(pieces), max_position_embeddings=128, **sizes)
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def parser(encoder) -> SpanParserForTokenClassification:
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    torch.manual_seed(1)
    model = SpanParserForTokenClassification.from_encoder(str(encoder), LABELS, TAGS, tokenizer, span_hidden_size=16)
    with torch.no_grad():
        model.label_head.weight.normal_()
        model.label_head.bias.normal_()
    return model


def test_the_best_tree_is_that_of_brute_force():
    """Several sentences of unequal length at once; what lies outside of a sentence does not count."""
    torch.manual_seed(0)
    for _ in range(20):
        count = torch.randint(1, 8, (4,))
        gain = torch.randn(4, int(count.max()) + 1, int(count.max()) + 1).clamp(min=0)
        trees = F.pad(BinaryTrees(gain[:, :-1, 1:], count).argmax(), (1, 0, 0, 1))
        for values, chosen, n in zip(gain, trees, count.tolist(), strict=True):

            @cache
            def best(i: int, j: int, values=values) -> float:
                inside = max((best(i, k) + best(k, j) for k in range(i + 1, j)), default=0.0)
                return float(values[i, j]) + inside

            spans = [tuple(span) for span in chosen.nonzero().tolist()]
            assert len(spans) == 2 * n - 1 and (0, n) in spans and max(j for _, j in spans) == n
            assert all(a <= c or c <= b or (c <= a and b <= d) or d <= a for a, b in spans for c, d in spans)
            assert sum(float(values[span]) for span in spans) == pytest.approx(best(0, n), abs=1e-5)


def batch_of(parser, encoder, *sentences: str) -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    codes = [encode_words(tokenizer, sentence.split()) for sentence in sentences]
    ids, mask = padded([ids for ids, _ in codes], left=False, fill=0)
    ends = padded([ends for _, ends in codes], left=False, fill=0)[0].bool()
    return {"input_ids": ids, "attention_mask": mask, "word_ends": ends}


@torch.no_grad()
def test_parse_gives_the_tree_with_the_largest_sum(parser, encoder):
    batch = batch_of(parser, encoder, "abc de f gh", "it")
    output, scores = parser.parse(**batch), parser(**batch)
    log_probs = scores.logits.log_softmax(2)
    i, j = torch.triu_indices(5, 5, 1).tolist()
    null = log_probs[0, :, 0].sum()
    best = {(a, b): log_probs[0, k, 1:].max() - log_probs[0, k, 0] for k, (a, b) in enumerate(zip(i, j, strict=True))}
    spans, labels = output.spans[0][0], output.labels[0][0]
    place = {0: 0} | {end: k for k, end in enumerate(output.word_ends[0], 1)}
    words = list(dict.fromkeys((place[a], place[b]) for a, b in spans))
    assert words[-1] == (0, 4) and output.log_probs[0, 0] == pytest.approx(float(null + sum(map(best.get, words))))
    chains = {(place[a], place[b]): "" for a, b in spans}
    for label, (a, b) in zip(labels, spans, strict=True):
        chains[place[a], place[b]] = f"{label} {chains[place[a], place[b]]}".strip()
    for k, span in enumerate(zip(i, j, strict=True)):
        if span in chains:
            assert chains[span] == LABELS[int(log_probs[0, k, 1:].argmax())]
    tags = scores.tag_logits.argmax(2)
    assert output.tags == [[TAGS[k] for k in tags[0, :4]], [TAGS[tags[1, 0]]]]
    assert output.brackets(["it"], 1).endswith(" it" + ")" * len(output.labels[1][0]))


def test_padding_batches_and_special_tokens_change_nothing(parser, encoder):
    sentences = ("abc de f", "gh ijk l m n", "o")
    together = parser.parse(**batch_of(parser, encoder, *sentences))
    for row, sentence in enumerate(sentences):
        alone = parser.parse(**batch_of(parser, encoder, sentence))
        torch.testing.assert_close(together.log_probs[row], alone.log_probs[0])
        assert (together.spans[row], together.labels[row]) == (alone.spans[0], alone.labels[0])
    batch = batch_of(parser, encoder, *sentences)
    left = parser.parse(**{name: F.pad(value, (2, 0)) for name, value in batch.items()})
    torch.testing.assert_close(left.log_probs, together.log_probs)
    assert left.spans[0][0] == [(i + 2, j + 2) for i, j in together.spans[0][0]] and left.offsets == [2, 2, 2]
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    framed = torch.tensor([[tokenizer.cls_token_id, 11, 12, tokenizer.sep_token_id]])
    plain = parser.parse(torch.tensor([[11, 12]]))
    torch.testing.assert_close(parser.parse(framed).log_probs, plain.log_probs)
    assert parser.parse(framed).brackets(["b", "c"]) == plain.brackets(["b", "c"])


def test_the_loss_is_the_cross_entropy_of_all_spans(parser, encoder):
    trees = parse_treebank(["(S (NP (N ab) (N c)) (S (VP (V d))))", "(QP (NP (N ef) (X g)))"])
    examples = span_batches.encode_spans(trees, transformers.AutoTokenizer.from_pretrained(encoder), parser.config)
    assert examples[0].spans == [(0, 2, 1), (2, 3, 3), (0, 3, 2)]
    assert examples[1].spans == [(0, 2, 1)] and examples[1].tags == [0, -100]  # QP and X are unknown
    batch = span_batches.collate_spans(examples, 0)
    scores, trained = parser(**{k: v for k, v in batch.items() if "label" not in k}), parser(**batch)
    i, j = torch.triu_indices(4, 4, 1)
    nats = F.cross_entropy(scores.logits.flatten(0, 1), batch["labels"][:, i, j].flatten(), reduction="sum") / 5
    torch.testing.assert_close(trained.losses["span"], nats)
    torch.testing.assert_close(trained.loss, nats + 0.3 * trained.losses["tag"])


def test_weights_say_how_often_a_sentence_is_read():
    sampler = span_batches.WeightedBatchSampler(
        torch.tensor([2.0, 0.25]).repeat_interleave(200).numpy(), [3] * 400, 8, 100, 64, 0
    )
    epochs = [[row for batch in sampler.epoch_batches(epoch) for row in batch] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    for rows in epochs:
        assert sorted(row for row in rows if row < 200) == sorted([*range(200)] * 2)
        assert 30 < sum(row >= 200 for row in rows) < 70


def test_tokenizers_read_what_treebanks_write(encoder, tmp_path):
    span_batches.tokenizer_of_treebanks(transformers.AutoTokenizer.from_pretrained(encoder)).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids, ends = encode_words(tokenizer, ["-LRB-", "do", "n't", "``", "-RRB-"])
    assert tokenizer.convert_ids_to_tokens(ids) == ["(", "d", "##o", "not", '"', ")"]
    assert ends == [True, False, True, True, True, True]
    assert treebank_words("It's (late), Mr. X. said.") == "It 's -LRB- late -RRB- , Mr. X. said .".split()


@pytest.fixture(scope="module", params=["LoRA", "all weights"])
def trained(request, encoder, tmp_path_factory) -> Path:
    """The folder of a run on the embedded treebank."""
    folder = tmp_path_factory.mktemp("run") / "run"
    options = ["--config", "span_parser_mini", "--encoder", str(encoder), "--output-dir", str(folder)]
    options += ["--lora-r", "2" if request.param == "LoRA" else "0", "--drop-labels", "NML", "--learning-rate", "5e-3"]
    options += ["--max-train-steps", "120", "--evaluation-steps", "60", "--evaluation-sentences", "20"]
    train_span_parser.main([*options, "--max-batch-tokens", "400", "--dataloader-num-workers", "0"])
    return folder


@pytest.fixture
def named(trained, encoder) -> list[str]:
    """The folder, with the encoder of an adapter, as commands take it."""
    return [str(trained), *(["--backbone", str(encoder)] if (trained / "model" / "adapter").is_dir() else [])]


def test_training_saves_what_parses(trained, encoder):
    results = json.loads((trained / "all_results.json").read_text())
    first, *_, last = (evaluation["losses"]["labeled_f1"] for evaluation in results["evaluations"])
    assert last > first + 5 and 40 < results["test"]["losses"]["tags"] <= 100
    config = SpanParserConfig.from_pretrained(trained / "model")
    is_adapter = config.adapter_of is not None
    backbone = {"backbone": str(encoder)} if is_adapter else {}
    model, tokenizer = load_pretrained(str(trained), transformers.AutoModelForTokenClassification, **backbone)
    assert is_adapter == (trained / "model" / "adapter").is_dir()
    assert type(model) is SpanParserForTokenClassification
    tree, best = "ab cd ef", f"best_{results['best_step']}"
    assert best in {path.name for path in trained.iterdir()}
    ids, ends = encode_words(tokenizer, tree.split())
    parsed = model.parse(torch.tensor([ids]), word_ends=torch.tensor([ends]))
    assert set(parsed.tags[0]) <= set(config.tags) and len(parsed.tags[0]) == 3


@pytest.mark.usefixtures("warm_verify")
def test_the_saved_parser_computes_the_same_without_the_package(trained, encoder, tmp_path):
    is_adapter = (trained / "model" / "adapter").is_dir()
    report = verify_export(trained / "model", backbone=str(encoder) if is_adapter else None)
    assert report.passed and "parse" in [check.name for check in report.checks]


def test_silver_trees_with_their_confidence(named, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "silver.mrg"
    text.write_text("We agree (now).\nIt is late.\nWe agree (now).\nno\n", encoding="utf-8")
    command = ["silver", str(text), "--parser", *named, "--batch-size", "2"]
    assert main([*command, "--out", str(out)]) == 0
    table = [row.split() for row in Path(f"{out}.confidence.tsv").read_text().splitlines()]
    assert table[0] == ["words", "confidence"] and [row[0] for row in table[1:]] == ["6", "4", "6", "1"]
    assert all(float(row[1]) < 0 for row in table[1:]) and not Path(f"{out}.partial").exists()
    words = [sentence.words for sentence in read_treebank(out)]
    assert words == [tuple(treebank_words(line)) for line in text.read_text().splitlines()]
    assert main([*command, "--out", str(tmp_path / "none.mrg"), "--min-confidence", "0"]) == 0
    assert (tmp_path / "none.mrg").read_text() == "" and "4 left out" in capsys.readouterr().err
    assert main([*command, "--out", str(out), "--overwrite", "--min-confidence", "0.9"]) == 2
    assert "less than or equal to 0" in capsys.readouterr().err and read_treebank(out)
    # A sentence that is too long for the encoder, and one of characters that its tokenizer drops.
    text.write_text(f"We agree. It is late.\n{'a' * 90} {'b' * 90}\n\u0300\n", encoding="utf-8")
    assert main([*command, "--out", str(out), "--overwrite", "--split-sentences"]) == 0
    assert [len(sentence.words) for sentence in read_treebank(out)] == [3, 4]
    facts = json.loads(Path(f"{out}.meta.json").read_text())
    assert facts["trees"] == 2 and facts["left_out"] == {"not read": 2, "less sure": 0}


def test_silver_trees_of_a_stopped_run_are_kept(named, tmp_path, monkeypatch):
    text, out = tmp_path / "text.txt", tmp_path / "silver.mrg"
    text.write_text("We agree now.\nIt is\nno\n", encoding="utf-8")
    command = ["silver", str(text), "--parser", *named, "--batch-size", "1", "--out", str(out)]
    parse, calls = SpanParserForTokenClassification.parse, []

    def stopped(self, *arguments, **options):
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("stopped")
        return parse(self, *arguments, **options)

    monkeypatch.setattr(SpanParserForTokenClassification, "parse", stopped)
    assert main(command) == 2 and not out.exists()
    assert main(command) == 0 and len(calls) == 4
    assert [len(sentence.words) for sentence in read_treebank(out)] == [4, 2, 1]


def test_silver_needs_a_span_parser(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("We agree.\n", encoding="utf-8")
    command = ["silver", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.mrg")]
    assert main([*command, "--parser", str(CARDS / "rnng-tiny")]) == 2
    assert "gives no tags. Name a span parser" in capsys.readouterr().err
    assert main([*command, "--parser", str(CARDS / "rnng-tiny"), "--language", "de"]) == 2
    assert "--language: this belongs to --split-sentences" in capsys.readouterr().err


def test_parse_and_evaluate_as_other_models(named, tmp_path, capsys):
    """The JSON of `parse` has tags; punctuation is told by the gold tags."""
    (tmp_path / "in.txt").write_text("We agree .\n", encoding="utf-8")
    (line,) = run(capsys, "parse", tmp_path / "in.txt", "--model", *named, "--format", "json").splitlines()
    parsed = ParsedSentence.from_dict(json.loads(line))
    assert parsed.words == ("We", "agree", ".") and len(parsed.tags) == 3 and parsed.tree().log_prob < 0
    bank, out = tmp_path / "gold.mrg", tmp_path / "f1.json"
    bank.write_text("(S (NP (PRP We)) (VP (VBP agree)) (. .))\n", encoding="utf-8")
    command = ["evaluate", "parsing", "--treebank", str(bank), "--convention", "evalb", "--out", str(out)]
    assert main([*command, "--model", *named]) == 0
    result = json.loads(out.read_text())
    assert 0 <= result["scores"]["f1"] <= 100 and result["options"]["punctuation"] == "left out as the parameters say"


def test_an_adapter_in_16_bits_is_added_to_the_encoder_in_32(parser, encoder, tmp_path):
    parser.add_adapter(LoraConfig(r=2, target_modules=linear_layers(parser)))
    with torch.no_grad():
        for name, weight in parser.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    parser.save_pretrained(tmp_path / "whole")
    file = shutil.copytree(tmp_path / "whole", tmp_path / "half") / "adapter" / "adapter_model.safetensors"
    weights = {name: value.to(torch.bfloat16) for name, value in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    assert not any("word_embeddings" in name for name in weights)
    whole, half = (
        SpanParserForTokenClassification.from_pretrained(tmp_path / name, backbone=str(encoder))
        for name in ("whole", "half")
    )
    for (name, value), other in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(other, value, rtol=2**-8, atol=1e-3, msg=name)
    layer, own = (
        model.encoder.layer[0].output.dense for model in (half.encoder, transformers.AutoModel.from_pretrained(encoder))
    )
    assert not torch.equal(layer.weight, own.weight)
