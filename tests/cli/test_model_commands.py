"""`synlm generate`, `convert`, `info`, `export`, `verify`, `push` as a user types them. With a Hub: test_hub_server."""

import copy
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_synlm import GPSTConfig, GPSTForCausalLM, GPSTForSequenceClassification, ONLSTMForSequenceClassification
from hf_synlm.cli import main
from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.hub.checkpoint import check_complete
from hf_synlm.hub.export import export_model
from hf_synlm.training.arguments.finetuning import ModelArguments
from hf_synlm.training.tasks.finetuning import FineTuning
from tests.helpers.commands import fail, remarks, run
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import ARCHITECTURES, model_and_tokenizer, small_gpst

PROMPTS = ["We ask for", "America is back, standing tall"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model of the tokenizer of `saved`, quick to verify."""
    tokenizer = model_and_tokenizer("gpst")[1]
    return export_model(small_gpst(tokenizer), tokenizer, tmp_path / "small")


# ------------------------------------------------------------------------------------------------------- generate
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_is_generated_as_one_by_one(architecture: str):
    model, tokenizer = model_and_tokenizer(architecture)
    prompts = [*PROMPTS, ""]
    together = generate_texts(model, tokenizer, prompts, max_new_tokens=4)
    alone = [generate_texts(model, tokenizer, [prompt], max_new_tokens=4)[0] for prompt in prompts]
    assert [text.text for text in together] == [text.text for text in alone]
    assert [text.tree for text in together] == [text.tree for text in alone]
    for text in together:
        assert text.num_new_tokens <= 4 and text.ended == (text.num_new_tokens < 4)
        assert (len(text.tree.hypotheses) == 1) == (architecture not in ("lstm", "gpt2"))
        if text.tree.hypotheses:
            text.tree.brackets()  # one tree over all tokens


def test_trees_are_those_of_generate():
    model, tokenizer = model_and_tokenizer("gpst")
    batch = tokenizer(PROMPTS[:1], return_tensors="pt")
    output = model.generate(**batch, num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    [found] = generate_texts(model, tokenizer, PROMPTS[:1], num_beams=3, max_new_tokens=4)
    assert list(found.tree.hypotheses[0].spans) == output.spans[0]
    assert found.text == tokenizer.decode(output.sequences[0]).removeprefix(" ")
    assert found.score == pytest.approx(output.sequences_scores[0].item())


@pytest.mark.parametrize("architecture", ["gpst", "on_lstm"])
def test_padding_that_is_written_as_a_word_belongs_to_the_tree(architecture: str):
    model, tokenizer = model_and_tokenizer(architecture)
    pad = tokenizer.pad_token_id if architecture == "gpst" else 7

    def write(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = pad if ids.shape[1] % 2 else 9
        return scores.masked_fill(torch.arange(scores.shape[-1]) != wanted, -torch.inf)

    [found] = generate_texts(model, tokenizer, ["We ask"], max_new_tokens=4, logits_processor=[write])
    assert found.num_new_tokens == 4 and not found.ended
    assert len(found.tree.words) == len(tokenizer("We ask")["input_ids"]) + 4


@pytest.mark.parametrize("architecture", ["gpst", "rnng", "gpt2"])
def test_a_text_that_stops_at_a_word_holds_it(architecture: str):
    model, tokenizer = model_and_tokenizer(architecture)
    own = model.config.eos_token_id
    options = {"max_new_tokens": 5, "suppress_tokens": [own, tokenizer.pad_token_id or own]}
    [whole] = generate_texts(model, tokenizer, PROMPTS[:1], **options)
    new = model.generate(**tokenizer(PROMPTS[:1], return_tensors="pt"), **options)[0].tolist()[-5:]
    for stop in ([new[1], own], new[1]):
        [found] = generate_texts(model, tokenizer, PROMPTS[:1], **options, eos_token_id=stop)
        assert found.ended and found.num_new_tokens == new.index(new[1]) + 1
        assert whole.text.startswith(found.text)


@pytest.mark.parametrize("name", ["rnng", "on_lstm", "lstm"])
def test_prompts_of_any_length_fit_models_without_positions(name: str):
    model, tokenizer = map(copy.deepcopy, model_and_tokenizer(name))
    model.config.max_position_embeddings = 5
    [found] = generate_texts(model, tokenizer, ["peace and hope peace and hope"], max_new_tokens=2, num_beams=1)
    assert found.num_new_tokens <= 2


def test_generate_formats(saved_models: Path, tmp_path: Path, monkeypatch, capsys):
    common = ("generate", "--model", saved_models / "gpst", "--device", "cpu", "--max-new-tokens", 3)
    common += ("--sample", "--seed", 1)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(("\n".join(PROMPTS) + "\n\n").encode())))
    printed = [json.loads(line) for line in run(capsys, *common, "-", "--format", "json").splitlines()]
    assert [text["prompt"] for text in printed] == [*PROMPTS, ""] and printed.pop()["text"] == ""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    lines = run(capsys, *common, tmp_path / "prompts.txt").splitlines()
    (tmp_path / "gaps.txt").write_text("\n" + "\n \n".join(PROMPTS))
    gaps = run(capsys, *common, tmp_path / "gaps.txt").splitlines()
    assert gaps[0::2] == [""] * len(PROMPTS) and gaps[1::2] == lines
    gaps = run(capsys, *common, tmp_path / "gaps.txt", "--format", "json").splitlines()
    assert [json.loads(line)["prompt"] for line in gaps[1::2]] == PROMPTS and json.loads(gaps[0])["text"] == ""
    gaps = run(capsys, *common, tmp_path / "gaps.txt", "--format", "brackets").splitlines()
    assert gaps[0::2] == [""] * len(PROMPTS) and gaps[1::2] == [text["brackets"] for text in printed]
    assert lines == [" ".join(text["text"].splitlines()) for text in printed]
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    brackets = run(capsys, *common, *given, "--format", "brackets")
    assert brackets.splitlines() == [text["brackets"] for text in printed]
    table = run(capsys, *common, *given, "--format", "table").splitlines()
    assert table[0] == "| prompt | text | score | tree |" and len(table) == 4
    assert run(capsys, *common, *given, "--format", "json", "--out", tmp_path / "out.jsonl") == ""
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in written.splitlines()] == printed
    # Trees go on to `draw`, here and through standard input.
    drawing = run(capsys, *common, *given, "--format", "tree")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(brackets.encode())))
    assert run(capsys, "draw", "-").splitlines()[0] in drawing.splitlines()


def test_leaves_are_words_if_the_model_knows_their_ends():
    card = Path(__file__).parents[2] / "model_cards" / "rnng-mini"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(card), AutoTokenizer.from_pretrained(card)
    for new in range(1, 6):  # a text may stop inside a word
        [text] = generate_texts(model, tokenizer, ["The zygomorphic minister"], num_beams=2, max_new_tokens=new)
        assert len(tokenizer(text.text)["input_ids"]) > len(text.tree.words)
        assert list(text.tree.words) == text.text.split() == text.to_dict()["leaves"]
        assert text.tree.words[1] == "zygomorphic"
        assert text.tree.hypotheses[0].spans[-1] == (0, len(text.tree.words))


def test_prompts_are_split_as_the_model_reads_text():
    card = Path(__file__).parents[2] / "model_cards" / "rnng-mini"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(card), AutoTokenizer.from_pretrained(card)

    def tokens(prompt: str, how: str) -> tuple[str, ...]:
        [text] = generate_texts(model, tokenizer, [prompt], tokenize=how, num_beams=2, max_new_tokens=2)
        assert text.prompt == prompt
        return text.tree.words

    split = tokens("She has n't said :", "words")
    assert tokens("She hasn't said:", "auto") == split != tokens("She hasn't said:", "words")
    assert tokens("I met Dr.", "auto") == tokens("I met Dr.", "words")  # not the end of a sentence
    assert tokens("It was cold.", "auto") == tokens("It was cold .", "words")
    assert tokens("<s> It was cold.", "auto") == tokens("<s> It was cold .", "words")
    refused("reads no word of the prompt '...'", tokens, "...", "no-punctuation")
    refused("tokenize is 'PTB'", tokens, "It was cold.", "PTB")
    model.config.text_style = "natural"
    refused("reads prompts as they are written", tokens, "It was cold.", "ptb")


def test_generate_options(saved_models: Path, capsys):
    common = ("generate", "--device", "cpu", "--prompt", "We ask", "--max-new-tokens", 3)
    rnng = (*common, "--model", saved_models / "rnng")
    out = run(capsys, *rnng, "--num-beams", 3, "--num-sequences", 2, "--action-beam-size", 12, "--format", "brackets")
    assert len(out.splitlines()) == 2 and all(line.startswith("(") for line in out.splitlines())
    assert "needs trees" in fail(capsys, *rnng, "--structure-mode", "marginal", "--format", "brackets")
    gpt2 = (*common, "--model", saved_models / "gpt2")
    words = run(capsys, *gpt2, "--sample", "--top-k", 5, "--temperature", 0.7, "--num-sequences", 3)
    assert len(words.splitlines()) == 3
    assert run(capsys, *gpt2, "--generate-option", "min_new_tokens=3", "--format", "json")
    assert "needs trees" in fail(capsys, *gpt2, "--format", "tree")
    assert "--action-beam-size" in fail(capsys, *gpt2, "--action-beam-size", 3)
    message = fail(capsys, *common, "--model", saved_models / "on_lstm", "--action-beam-size", 5)
    assert "--action-beam-size: not an option of ONLSTMForCausalLM.generate" in message
    assert "--num-beams 2" in fail(capsys, *gpt2, "--num-sequences", 2)
    assert "works only with --sample" in fail(capsys, *gpt2, "--top-k", 2)
    assert "act only on words" in " ".join(run(capsys, "generate", "--help").replace("│", " ").split())
    assert "Write NAME=VALUE" in fail(capsys, *gpt2, "--generate-option", "x")
    assert "the command has its own option for" in fail(capsys, *gpt2, "--generate-option", "num_return_sequences=2")
    assert "not used by the model: ['typo']" in fail(capsys, *gpt2, "--generate-option", "typo=1")
    assert "Leave one of the two out" in fail(capsys, *gpt2, __file__)
    assert "is a folder or a device" in fail(capsys, *gpt2, "--out", saved_models)
    card = str(Path(__file__).parents[2] / "model_cards" / "palm-s-tiny")
    said = remarks(capsys, "generate", "--device", "cpu", "--prompt", "the people of this country", "--model", card)
    assert "texts without new words: 1 of 1" in said


@pytest.mark.parametrize("name", ["gpst", "gpt2"])
def test_prompts_that_do_not_fit_are_named_before_anything_is_generated(name: str):
    model, tokenizer = model_and_tokenizer(name)
    room = model.config.max_position_embeddings - len(tokenizer("We ask", add_special_tokens=False)["input_ids"])
    for prompts, new in ((["We ask", "peace and hope " * 60], 2), (["We", "We ask"], room + 1)):
        with pytest.raises(ValueError, match=r"prompt 2 has \d+ tokens. With .* positions"):
            generate_texts(model, tokenizer, prompts, batch_size=1, max_new_tokens=new)


# -------------------------------------------------------------------------------------------------------- convert
def test_convert(tmp_path: Path, capsys):
    state, _, config = read_case("gpst/02_packed")
    for section in ("r2d2_config", "gpt_config"):
        (tmp_path / f"{section}.json").write_text(json.dumps(config[section]))
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "model.bin")
    words = ["convert", "gpst", "--weights", tmp_path / "model.bin", "--out", tmp_path / "out"]
    words += ["--config", tmp_path / "r2d2_config.json", "--config", tmp_path / "gpt_config.json"]
    # A tokenizer that does not fit is found before anything is written.
    model_and_tokenizer("gpst")[1].save_pretrained(tmp_path / "tokenizer")
    assert "tokens and the model" in fail(capsys, *words, "--tokenizer", tmp_path / "tokenizer")
    assert "holds no tokenizer" in fail(capsys, *words, "--tokenizer", tmp_path)
    assert not (tmp_path / "out").exists()
    run(capsys, *words)
    assert check_complete(tmp_path / "out") == GPSTConfig().auto_map
    loaded = GPSTForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.model.root_embedding, state["r2d2.outside_root_embedding"])
    assert "exists" in fail(capsys, *words)
    missing = ("convert", "rnng", "--weights", "no.pt", "--config", "no.json", "--out", "x")
    assert "'no.pt' does not exist" in fail(capsys, *missing)


# ----------------------------------------------------------------------------------------- info, export, verify, push
def test_info(saved_models: Path, small: Path, capsys):
    model = model_and_tokenizer("rnng")[0]
    table = run(capsys, "info", saved_models / "rnng")
    assert "RNNGForCausalLM (rnng)" in table and f"{model.num_parameters():,}" in table
    found = json.loads(run(capsys, "info", saved_models / "rnng", "--format", "json"))
    assert found["nonterminals"] == 3 and found["self_contained"] and "custom_code" in found["card"]["tags"]
    assert found["config"]["action_beam_size"] == 12 and "modeling_rnng.py" in found["code"]
    shutil.copytree(saved_models / "rnng", small.with_name("untold"))
    (small.with_name("untold") / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in run(capsys, "info", small.with_name("untold"))
    stock = json.loads(run(capsys, "info", saved_models / "gpt2", "--format", "json"))
    assert stock["self_contained"] and not stock["problems"] and stock["card"] is None  # of transformers itself
    for name, number in (("rnng-mini", 3_297_058), ("prpn-syd-tiny", 258_098)):  # they have buffers beside parameters
        card = Path(__file__).parents[2] / "model_cards" / name
        assert json.loads(run(capsys, "info", card, "--format", "json"))["num_parameters"] == number
    (small / "tokenizer_config.json").unlink()
    assert "none, so it cannot read text" in run(capsys, "info", small)
    (small / "trees_spans.py").unlink()
    assert "needs ['trees_spans.py']" in run(capsys, "info", small)
    assert "give either a model or --files" in fail(capsys, "info")


@pytest.mark.parametrize("architecture", ["gpst", "rnng", "on_lstm"])
def test_info_lists_the_files_that_ship(architecture: str, saved_models: Path, capsys):
    found = json.loads(run(capsys, "info", "--files", architecture, "--format", "json"))
    exported = {file.name: file.read_text(encoding="utf-8") for file in (saved_models / architecture).glob("*.py")}
    assert found == {name: len(text.splitlines()) for name, text in exported.items()}
    total = run(capsys, "info", "--files", architecture).splitlines()[-1]
    assert total.split() == ["total:", str(len(found)), "files", f"{sum(found.values()):,}"]


def test_export(small: Path, tmp_path: Path, capsys):
    facts = {"repo_id": "org/small", "license": "cc0-1.0", "training_data": "Speeches.", "datasets": ["org/sotu"]}
    (tmp_path / "card.json").write_text(json.dumps(facts))
    (tmp_path / "card.yaml").write_text("repo_id: org/small\nlicence: mit\n")
    (tmp_path / "none.yaml").write_text("- a\n")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    out = tmp_path / "out"
    run(capsys, "export", small, "--out", out, "--facts", tmp_path / "card.json", "--dtype", "bfloat16")
    assert GPSTForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert all((out / file.name).read_bytes() == file.read_bytes() for file in small.glob("*.py"))
    data = ModelCard.load(out / "README.md").data
    assert data.license == "cc0-1.0" and data.datasets == ["org/sotu"] and "custom_code" in data.tags
    before = (out / "README.md").read_text()
    assert "org/small" in before and "Speeches." in before
    again = ("export", small, "--out", out, "--overwrite", "--facts")
    assert "--overwrite" in fail(capsys, "export", small, "--out", out)
    assert "licence" in fail(capsys, *again, tmp_path / "card.yaml")
    assert "mapping of facts to values" in fail(capsys, *again, tmp_path / "none.yaml")
    assert "is not valid YAML" in fail(capsys, *again, tmp_path / "bad.yaml")
    assert (out / "README.md").read_text() == before


def test_export_keeps_a_classifier(small: Path, tmp_path: Path, capsys):
    classifier = GPSTForSequenceClassification.from_pretrained(small, num_labels=3)
    export_model(classifier, AutoTokenizer.from_pretrained(small), tmp_path / "trained")
    run(capsys, "export", tmp_path / "trained", "--out", tmp_path / "out")
    loaded = GPSTForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(next(loaded.parameters()), next(classifier.parameters()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(classifier).__name__]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "text-classification" and len(loaded.config.id2label) == 3


def test_a_classifier_is_no_language_model(saved_models: Path, tmp_path: Path, capsys, caplog):
    folder, text = tmp_path / "trained", tmp_path / "a.txt"
    model = ONLSTMForSequenceClassification.from_pretrained(saved_models / "on_lstm", num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(saved_models / "on_lstm")
    export_model(model, tokenizer, folder)
    text.write_text("we agree\n")
    what = "saved as ONLSTMForSequenceClassification and lacks weights of ONLSTMForCausalLM"
    for command in (("parse", text), ("surprisal", text), ("generate", "--prompt", "we")):
        assert what in fail(capsys, *command, "--model", folder)
    config = AutoConfig.from_pretrained(folder)
    given = {"auto_class": AutoModelForCausalLM, "model_arguments": ModelArguments(str(folder)), "tokenizer": tokenizer}
    refused(what, FineTuning.load_model, SimpleNamespace(**given), config)
    model = GPSTForSequenceClassification.from_pretrained(saved_models / "gpst", num_labels=2)  # has all weights
    export_model(model, AutoTokenizer.from_pretrained(saved_models / "gpst"), tmp_path / "gpst")
    run(capsys, "surprisal", text, "--model", tmp_path / "gpst")
    assert "the model was saved as GPSTForSequenceClassification: its probabilities" in caplog.text


@pytest.mark.usefixtures("warm_verify")
def test_verify_and_push_stop_at_what_differs(small: Path, tmp_path: Path, capsys, caplog):
    options = ("--text", "We ask", "--max-new-tokens", 2, "--format", "json")
    report = json.loads(run(capsys, "verify", small, *options))
    assert "LOAD REPORT" not in caplog.text
    assert report["passed"] and {"AutoModelForCausalLM", "parse", "generate"} <= {c["name"] for c in report["checks"]}
    file = small / "modeling_gpst.py"
    file.write_text(file.read_text() + "\nraise RuntimeError('broken')\n")
    code = main(["push", str(small), "org/small", "--dry-run"])
    captured = capsys.readouterr()
    assert code == 1 and "was not pushed" in captured.err and "broken" in captured.out
    assert "is a file. Name the folder" in fail(capsys, "verify", small / "config.json")
    assert "--trust-remote-code" in fail(capsys, "verify", "org/model")
    assert "there is no folder 'modle'" in fail(capsys, "verify", "modle")
    assert "has no config.json" in fail(capsys, "push", tmp_path / "nowhere", "org/model")
    # The tests have no Hub: this is told before the folder is verified.
    assert "no login on the Hub" in fail(capsys, "push", small, "org/small")


def test_dry_run_lists_what_would_be_pushed(small: Path, capsys):
    (small / ".env").write_text("secret")
    lines = run(capsys, "push", small, "org/small", "--no-verify", "--dry-run").splitlines()
    listed = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in lines[:-1]}
    assert listed == {file.name: file.stat().st_size for file in small.iterdir() if file.name != ".env"}
    assert lines[-1].endswith("for org/small; nothing was pushed")
    lines = run(capsys, "push-code", "org/code", "--dry-run").splitlines()
    assert {"modeling_gpst.py", "pcfg_rules.py", "LICENSE", "requirements.txt"} <= {line.split()[1] for line in lines}
    assert "Name the repository OWNER/NAME" in fail(capsys, "push-code", "code", "--dry-run")
