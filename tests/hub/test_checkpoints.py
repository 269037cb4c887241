"""The checkpoints in `model_cards/`: they load, parse, generate and score as their cards say.

The committed results are compared with new computations on a few sentences and on all of them where that is quick, and
the cards with the results. `make checkpoints` makes everything anew.
"""

import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from release import make_checkpoints
from release.model_table import BEGIN, COMMAND, END, PAGE, model_table
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_synlm import PCFGConfig, PCFGForCausalLM
from hf_synlm.cli import main
from hf_synlm.evaluation.results import EvaluationResult, card_rows, load_result
from hf_synlm.hub import export, upload
from hf_synlm.hub.card import PAPERS, fill_card, missing_on_card
from hf_synlm.hub.checkpoint import INDEX_FILE, num_parameters, stored_tensors
from hf_synlm.hub.flatten import flat_files
from hf_synlm.hub.verify import verify_export
from hf_synlm.training.arguments.base import find_config
from tests.helpers import warm_python
from tests.helpers.commands import fail, remarks, run
from tests.helpers.refusals import raised, refused

ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "model_cards"
SPECIFICATIONS = make_checkpoints.read_specifications()
SENTENCE = "the people of this country agree"
# Evaluations that take seconds on all sentences; the others are repeated on the first ones.
QUICK = [(name, "parsing") for name in ("on-lstm-syd-tiny", "prpn-syd-tiny", "palm-s-tiny")]
QUICK += [(name, "perplexity") for name, _ in QUICK]

# Adapters load with their backbone only, which is not here.
WHOLE = [name for name, checkpoint in SPECIFICATIONS.items() if not checkpoint.get("is_adapter")]
each, each_whole = pytest.mark.parametrize("name", SPECIFICATIONS), pytest.mark.parametrize("name", WHOLE)


def load(name: str):
    return AutoModelForCausalLM.from_pretrained(CARDS / name), AutoTokenizer.from_pretrained(CARDS / name)


def test_every_folder_is_specified():
    assert {folder.name for folder in CARDS.iterdir() if folder.is_dir()} == set(SPECIFICATIONS)
    types = {json.loads((CARDS / name / "config.json").read_text())["model_type"] for name in SPECIFICATIONS}
    assert types == {"gpst", "rnng", "tree_lm", "pushdown", "urnng", "pcfg", "on_lstm", "prpn", "palm", "span_parser"}


@each
def test_files(name: str):
    files = {file.name for file in (CARDS / name).iterdir()}
    code = {file for file in files if file.endswith(".py")}
    weights = {"adapter"} if SPECIFICATIONS[name].get("is_adapter") else {make_checkpoints.WEIGHTS}
    needed = set(make_checkpoints.MODEL_FILES)
    needed -= {"generation_config.json"} if "task" in SPECIFICATIONS[name] else set()  # a parser writes no text
    assert files - code == {*needed, *weights, "README.md", "card.yaml", "results"}
    # `python training/make_checkpoints.py --begin-with card` makes the stubs anew.
    auto_map = json.loads((CARDS / name / "config.json").read_text())["auto_map"]
    assert code == {f"{reference.partition('.')[0]}.py" for reference in auto_map.values()}
    results = {file.stem for file in (CARDS / name / "results").iterdir()}
    assert results - {"tree"} == {"training", *SPECIFICATIONS[name]["evaluations"]}
    assert ("tree" in results) == (name in WHOLE)
    size = sum(file.stat().st_size for file in (CARDS / name).rglob("*") if file.is_file())
    assert size < SPECIFICATIONS[name]["max_bytes"]


@each
def test_card_is_what_the_results_say(name: str):
    folder = CARDS / name
    facts = make_checkpoints.card_facts(name, SPECIFICATIONS[name])
    assert make_checkpoints.facts_text(facts) == (folder / "card.yaml").read_text(encoding="utf-8")
    card = fill_card(AutoConfig.from_pretrained(folder), yaml.safe_load((folder / "card.yaml").read_text()))
    assert card == (folder / "README.md").read_text(encoding="utf-8")


@each
def test_a_reader_of_the_hub_finds_what_it_links(name: str):
    card = ModelCard.load(CARDS / name / "README.md")
    data, model_type = card.data, AutoConfig.from_pretrained(CARDS / name).model_type
    for paper in PAPERS[model_type]["arxiv"]:
        assert f"arxiv:{paper}" in data.tags and f"https://arxiv.org/abs/{paper}" in card.text
    assert data.widget == [{"text": SPECIFICATIONS[name]["example"]}]
    assert data.pipeline_tag == facts_of(name).get("task", "text-generation")
    ids = {"universal-dependencies/universal_dependencies", "nyu-mll/blimp", "cpllab/syntaxgym"}  # looked up on the Hub
    assert {*(data.datasets or ())} <= ids
    for result in data.eval_results or ():
        assert result.dataset_type in ids and result.metric_type in ("f1", "perplexity", "accuracy")
        assert result.source_url == f"https://huggingface.co/{name}#results" and "\n## Results\n" in card.text
    assert len(data.eval_results or ()) == sum("dataset_id" in row for row in facts_of(name)["results"])
    assert (not data.eval_results) == (SPECIFICATIONS[name]["kind"] == "tiny")
    assert "The licence of the code is Apache-2.0 (`LICENSE`)" in card.text
    assert not re.search(r"model_cards/|release asset|unpack it|float16", card.text)
    before = card.text.partition("```python")[0].partition("```bash")[0]
    assert re.search(r"\*\*\w+ F1 [0-9.]+\*\* on .*: agreement of its .*treebank, in per cent", before)
    assert ("```text" in before) == (name in WHOLE)


def facts_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((CARDS / name / "card.yaml").read_text(encoding="utf-8"))


@each_whole
def test_the_picture_of_a_card_is_what_the_model_parses(name: str):
    assert make_checkpoints.draw_example(name, SPECIFICATIONS[name]) == facts_of(name)["tree"]


def test_a_pushed_card_names_its_repository(tmp_path: Path):
    assert main(["export", str(CARDS / "gpst-mini"), "--out", str(tmp_path / "mine")]) == 0
    text = upload._named_card(tmp_path / "mine", "ann/gpst")["README.md"].decode()
    assert not re.search(r"(huggingface\.co/|--model |from_pretrained\(\")mine", text)
    assert text.count("https://huggingface.co/ann/gpst#results") == text.count("- task:\n")
    assert text.count("--model ann/gpst ") == len(SPECIFICATIONS["gpst-mini"]["evaluations"])


def test_table_of_the_minis_is_what_the_results_say():
    assert f"{BEGIN.format(COMMAND)}\n{model_table(SPECIFICATIONS)}\n{END}" in PAGE.read_text(encoding="utf-8")


@each
def test_configuration_is_the_one_trained(name: str):
    """A changed configuration needs new checkpoints."""
    trained = json.loads((CARDS / name / "results" / "training.json").read_text())
    settings = yaml.safe_load(Path(find_config(trained["config"])).read_text(encoding="utf-8"))
    trained["settings"].pop("overwrite_output_dir", None)  # of earlier versions; it changes no model
    settings["seed"] = SPECIFICATIONS[name].get("seed", settings["seed"])
    assert settings == trained["settings"], f"{trained['config']} changed: run training/make_checkpoints.py {name}"


@each_whole
def test_loads_parses_and_generates(name: str):
    model, tokenizer = load(name)
    assert type(model).__module__.startswith("hf_synlm.") and model.dtype == torch.float32
    batch = tokenizer([SENTENCE], return_tensors="pt")
    parsed = model.parse(**batch)
    length = batch["input_ids"].shape[1]
    assert parsed.spans[0][0][-1] == (0, length) and parsed.token_log_probs.isfinite().all()
    generated = model.generate(**batch, max_new_tokens=4, return_dict_in_generate=True)
    assert generated.sequences.shape[1] > length and generated.spans[0]
    assert model(**batch).logits.exp().sum(-1).allclose(torch.tensor(1.0), atol=1e-3)
    unknown = {tokenizer.unk_token_id} & set(batch["input_ids"][0].tolist())
    assert not unknown, "the examples should be of words that the model knows"


def test_the_minis_of_words_give_texts_back():
    """But for case and punctuation, which `--punctuation remove` drops; other cards tell of unknown words."""
    tokenizer = AutoTokenizer.from_pretrained(CARDS / "gpst-mini")
    text = "the men's wives can't say it isn't a well-known rock-climbers' hut"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == f" {text}"


def evaluate(name: str, result: str, tmp_path: Path, *more: str) -> dict[str, float]:
    command = make_checkpoints.evaluations(name, SPECIFICATIONS[name])[result]["command"].split()[1:]
    out = tmp_path / f"{result}.json"
    assert main([*command, *more, "--out", str(out)]) == 0
    return load_result(out).scores


@pytest.mark.parametrize(("name", "result"), QUICK)
def test_scores_of_all_sentences(name: str, result: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    now, stated = evaluate(name, result, tmp_path), load_result(CARDS / name / "results" / f"{result}.json").scores
    # Products of matrices are rounded in another order on other machines, which may turn a tie between two trees.
    assert now == pytest.approx(stated, rel=1e-3, abs=0.2)


@pytest.mark.parametrize("name", ["gpst-tiny", "rnng-tiny", "tree-lm-tiny", "urnng-tiny"])
def test_trees_of_searched_models(name: str, tmp_path: Path, monkeypatch):
    """Better than random trees on the first sentences, as the results on all of them say."""
    monkeypatch.chdir(ROOT)
    result = next(iter(SPECIFICATIONS[name]["evaluations"]))
    now = evaluate(name, result, tmp_path, "--limit", "8")
    found = load_result(tmp_path / f"{result}.json")
    random = next(row["F1 by the convention"] for row in found.tables["unlabeled F1 (%)"] if row["trees"] == "random")
    # URNNG's trees are not better after so little text; its `parse` takes no `method`.
    assert now["f1"] > random or (name == "urnng-tiny" and found.options["parse"]["method"] == "search")


@each_whole
def test_export_computes_the_same(name: str, tmp_path: Path, capsys):
    out = tmp_path / name
    run(capsys, "export", CARDS / name, "--facts", CARDS / name / "card.yaml", "--out", out)
    for folder in (out, CARDS / name):
        assert not {"is_local", "local_files_only"} & set(json.loads((folder / "tokenizer_config.json").read_text()))
    assert (out / "README.md").read_bytes() == (CARDS / name / "README.md").read_bytes()
    saved, stored = (load_file(folder / "model.safetensors") for folder in (out, CARDS / name))
    assert saved.keys() == stored.keys() and all(torch.equal(saved[key], stored[key]) for key in stored)
    model_type = json.loads((out / "config.json").read_text())["model_type"]
    assert {file.name: file.read_text() for file in out.glob("*.py")} == flat_files(model_type)


def test_weights_keep_the_type_in_which_they_are_stored(tmp_path: Path):
    """They are loaded in float32, as config.json says; `--dtype` casts."""
    out, cast = tmp_path / "out", tmp_path / "cast"
    export = ["export", str(CARDS / "gpst-mini"), "--out"]
    assert main([*export, str(out)]) == 0 and main([*export, str(cast), "--dtype", "bfloat16"]) == 0
    assert stored_tensors(out) == stored_tensors(CARDS / "gpst-mini")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32
    facts = [yaml.safe_load((folder / "card.yaml").read_text()) for folder in (out, CARDS / "gpst-mini")]
    assert facts[0]["weights"] == facts[1]["weights"]  # so that numbers are still those of these weights
    assert {tensor.dtype for tensor in stored_tensors(cast).values()} == {"BF16"}
    assert "float16" not in (cast / "README.md").read_text()


@pytest.mark.parametrize("name", [*WHOLE, "sparse"])
def test_buffers_are_no_parameters(name: str, tmp_path: Path):
    if name == "sparse":
        model = PCFGForCausalLM(
            PCFGConfig(vocab_size=5, num_nonterminals=3, num_preterminals=3, grammar="sparse", num_rules=9)
        )
        model.save_pretrained(tmp_path)
    else:
        model = load(name)[0]
    folder = tmp_path if name == "sparse" else CARDS / name
    assert num_parameters(stored_tensors(folder)) == model.num_parameters()


def test_the_size_in_the_list_of_shards_is_that_of_the_files(tmp_path: Path):
    model = load("rnng-tiny")[0]
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    export._store_as(tmp_path, stored_tensors(CARDS / "rnng-tiny"))
    stored = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    size = sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert len(stored) > 1 and index["metadata"]["total_size"] == size < 3 * model.num_parameters()


def test_the_adapter_is_whole():
    """What it adds to its backbone, which is not here; `tests/models/tree_lm/test_adapter.py` loads others."""
    folder = CARDS / "tree-lm-smollm2"
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.adapter_of["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and config.searches_best_first
    assert tokenizer.decode(tokenizer("Zürich, isn't it?")["input_ids"]) == "Zürich, isn't it?"
    stored = stored_tensors(folder)
    assert {tensor.dtype for tensor in stored.values()} == {"F16"}
    labels = next(tensor for name, tensor in stored.items() if name.endswith("embed_labels.weight"))
    assert tuple(labels.shape) == (2 * len(config.nonterminals), config.hidden_size)


def test_the_adapter_of_the_span_parser_is_whole():
    """Its tokenizer reads a treebank's words as the encoder's text has them."""
    folder = CARDS / "span-parser-mini"
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.adapter_of["name"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert {"S", "NP", "VP", "S VP"} <= set(config.nonterminals) and {"NN", "VBD", "-LRB-"} <= set(config.tags)
    assert tokenizer.tokenize("-LRB- do n't -RRB-") == ["(", "do", "not", ")"]
    stored = stored_tensors(folder)
    assert {tensor.dtype for tensor in stored.values()} == {"F16"}
    assert not any("word_embeddings" in name for name in stored)
    heads = next(tensor for name, tensor in stored.items() if name.endswith("label_head.weight"))
    assert tuple(heads.shape) == (1 + len(config.nonterminals), config.span_hidden_size)


LOAD = """
import sys
from transformers import AutoModelForCausalLM
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    print(type(model).__module__.split(".")[0], type(model).__name__)
"""


def load_elsewhere(code: str, *arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a process that has not imported hf_synlm prints, or the end of its error."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = warm_python.run([sys.executable, "-c", code, *arguments], cwd=CARDS)
    return run.stdout.splitlines() if run.returncode == 0 else run.stderr.splitlines()[-3:]


def test_folders_load_the_code_of_the_installed_package(tmp_path: Path, monkeypatch):
    """Saved again, they hold the code themselves."""
    save = f"    model.save_pretrained({str(tmp_path)!r} + '/' + name)\n"
    found = load_elsewhere(LOAD + save, *WHOLE, tmp_path=tmp_path, monkeypatch=monkeypatch)
    configs = {name: json.loads((CARDS / name / "config.json").read_text()) for name in WHOLE}
    assert found == [f"hf_synlm {config['architectures'][0]}" for config in configs.values()]
    for name, config in configs.items():
        saved = {file.name: file.read_text() for file in (tmp_path / name).glob("*.py")}
        assert saved == flat_files(config["model_type"])
        assert json.loads((tmp_path / name / "config.json").read_text())["auto_map"] == config["auto_map"]


def test_folders_say_what_to_install(tmp_path: Path, monkeypatch):
    # As where it is not installed: transformers looks for the packages that the code imports.
    code = (
        "import importlib.util, sys\nsys.modules['hf_synlm'] = None\n"
        "import importlib\nreal = importlib.import_module\n"
        "def missing(name, *rest):\n"
        "    if name == 'hf_synlm': raise ImportError(\"No module named 'hf_synlm'\")\n"
        "    return real(name, *rest)\n"
        "importlib.import_module = missing\n"
    )
    found = load_elsewhere(code + LOAD, "gpst-tiny", tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "`pip install .` in its checkout" in " ".join(found) and "pip install hf_synlm" not in " ".join(found)


@pytest.mark.usefixtures("warm_verify")
def test_archive_is_reproducible(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(make_checkpoints, "ARCHIVES", tmp_path)
    checkpoint = make_checkpoints.read_specifications()["prpn-syd-tiny"]
    first = make_checkpoints.pack("prpn-syd-tiny", checkpoint)
    before = first.read_bytes()
    assert make_checkpoints.pack("prpn-syd-tiny", checkpoint).read_bytes() == before
    with tarfile.open(first) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    # A folder of code, weights and card; that such a folder loads alone is tested above and for every export.
    report = verify_export(tmp_path / "unpacked" / "prpn-syd-tiny")
    assert report.passed, report.table()


# ------------------------------------------------------------------------------------------------ rows of cards
def test_rows_name_what_numbers_depend_on():
    row = card_rows(load_result(CARDS / "rnng-tiny" / "results" / "perplexity.json"))[0]
    assert row["metric"] == "word_perplexity" and row["num_beams"] == 10
    assert row["estimator"] == "beam marginal, action beam 100, fast track 1"
    assert "unknown words, each predicted" in row["convention"] and row["seed"] == 0
    row = card_rows(load_result(CARDS / "gpst-tiny" / "results" / "parsing-inside.json"), split="test")[0]
    assert (row["num_beams"], row["estimator"], row["split"]) == (None, "inside", "test")
    assert set(row["baselines"]) == {"left", "right", "balanced", "random", "binarized gold"}
    found = load_result(CARDS / "rnng-tiny" / "results" / "parsing-evalb.json")
    for kind in ("labeled", "unlabeled"):
        found.tables = {f"{kind} brackets by EVALB (%)": []}
        (row,) = card_rows(found)
        assert row["metric"] == f"{kind}_f1" and row["convention"].startswith(f"evalb: {kind} brackets")


def test_unusable_results():
    rules = {"convention": "gpst", "punctuation": ""}
    refused("cannot show results of 'glue'", card_rows, EvaluationResult("glue", {"accuracy": 1.0}, {}, rules, {}))
    refused("no number 'f1'", card_rows, EvaluationResult("parsing", {}, {}, rules, {}))


@pytest.mark.parametrize(("name", "example"), [("gpst-tiny", "fruit flies like a banana"), ("palm-s-tiny", SENTENCE)])
def test_the_example_of_a_card_has_known_words(name: str, example: str, tmp_path: Path):
    card = (export.export_model(*load(name), tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert f'tokenizer(["{example}"]' in card


def test_a_copy_keeps_its_card(tmp_path: Path, capsys):
    """Facts go along by card.yaml; a card without them stays as it is, unless facts are given."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert main(["export", str(CARDS / "palm-s-tiny"), "--out", str(first)]) == 0
    assert main(["export", str(first), "--out", str(second)]) == 0
    edited = facts_of("palm-s-tiny") | {"repo_id": "ann/palm"}  # the name on the Hub stays, that of a folder does not
    (first / "card.yaml").write_text(yaml.safe_dump(edited | {"license": "mit"}))
    (remark,) = missing_on_card(str(first))
    assert "card.yaml and README.md differ in license: `synlm export` makes README.md from card.yaml" in remark
    (first / "card.yaml").write_text(yaml.safe_dump(edited))
    assert main(["export", str(first), "--out", str(tmp_path / "named")]) == 0
    assert yaml.safe_load((tmp_path / "named" / "card.yaml").read_text()) == edited
    facts = facts_of("palm-s-tiny")
    assert yaml.safe_load((second / "card.yaml").read_text()) == facts | {"repo_id": "second"}
    card = (second / "README.md").read_text()
    assert f"license: {facts['license']}" in card and card.count('from_pretrained("second"') == 2

    # Numbers of a card are those of its weights.
    weights = load_file(second / "model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, second / "model.safetensors", {"format": "pt"})
    for more in ([], ["--facts", second / "card.yaml"]):
        assert "reports the results of other weights" in fail(capsys, "export", second, *more, "--out", third)
    save_file(weights, second / "model.safetensors", {"format": "pt"})
    (second / "card.yaml").unlink()
    (second / "README.md").write_text("# My own words\n")
    result = str(CARDS / "palm-s-tiny" / "results" / "parsing.json")
    assert "and no card.yaml" in fail(capsys, "export", second, "--results", result, "--out", third)
    assert not third.exists()
    assert main(["export", str(second), "--out", str(third)]) == 0
    assert (third / "README.md").read_text() == "# My own words\n" and not (third / "card.yaml").exists()


def test_results_of_another_model_are_refused(tmp_path: Path, capsys):
    command = ["export", str(CARDS / "palm-s-tiny"), "--out", str(tmp_path / "out"), "--results"]
    other = CARDS / "prpn-syd-tiny" / "results" / "parsing.json"
    assert "PRPNForCausalLM with 258,098 parameters" in fail(capsys, *command, other)
    result = json.loads((CARDS / "palm-s-tiny" / "results" / "parsing.json").read_text())
    result["model"]["weights"] = [{"path": "elsewhere/model.safetensors", "bytes": 1, "sha256": "0" * 64}]
    (tmp_path / "parsing.json").write_text(json.dumps(result))
    assert "of the weights differ" in fail(capsys, *command, tmp_path / "parsing.json")
    assert not (tmp_path / "out").exists()


def test_a_copy_in_another_type_has_no_results_of_the_original(tmp_path: Path, capsys):
    command = ["export", str(CARDS / "palm-s-tiny"), "--dtype", "bfloat16", "--out", str(tmp_path / "out")]
    result = CARDS / "palm-s-tiny" / "results" / "parsing.json"
    assert "was measured in float32, and the copy has bfloat16" in fail(capsys, *command, "--results", result)
    for facts in ([], ["--facts", str(CARDS / "palm-s-tiny" / "card.yaml")]):
        said = remarks(capsys, *command, *facts, "--overwrite")
        assert "leaves out the results in card.yaml" in said and "Loading weights" not in said
        known = yaml.safe_load((tmp_path / "out" / "card.yaml").read_text())
        assert "license" in known and not {"results", "weights"} & set(known)
        assert not ModelCard.load(tmp_path / "out" / "README.md").data.eval_results
    # What is measured in the type of the copy, or stated by the user, stays.
    measured = json.loads(result.read_text())
    measured["model"]["dtype"] = "bfloat16"
    (tmp_path / "half.json").write_text(json.dumps(measured))
    half = ("--results", str(tmp_path / "half.json"))
    assert main([*command, *half, "--facts", str(CARDS / "palm-s-tiny" / "card.yaml"), "--overwrite"]) == 0
    rows = yaml.safe_load((tmp_path / "out" / "card.yaml").read_text())["results"]
    assert [row["metric"] for row in rows] == ["unlabeled_f1"]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "| trees.test.txt | all |" in card.content and "```text" not in card.content
    own = yaml.safe_load((CARDS / "palm-s-tiny" / "card.yaml").read_text())["results"][:1]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"results": own}))
    assert main([*command, "--facts", str(tmp_path / "own.yaml"), "--overwrite"]) == 0
    assert yaml.safe_load((tmp_path / "out" / "card.yaml").read_text())["results"] == own
    # A configuration as transformers 4 writes it, or without a type; a card without facts.
    shutil.copytree(CARDS / "palm-s-tiny", copy := tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    dtype, command[1] = config.pop("dtype"), str(copy)
    for fields in ({"torch_dtype": dtype}, {}):
        (copy / "config.json").write_text(json.dumps({**config, **fields}))
        assert "leaves out the results" in remarks(capsys, *command, "--overwrite")
    (copy / "card.yaml").unlink()
    assert "README.md is not changed: if it reports numbers" in remarks(capsys, *command, "--overwrite")


COMMANDS = [
    ("synlm evaluate pairs /data/ann/x.tsv --out=/data/a/b.json", "synlm evaluate pairs x.tsv --out=b.json"),
    ("synlm parse '/data/my texts/a.txt' ~/m", "synlm parse a.txt m"),
    ("synlm parse model_cards/gpst-tiny ../x -", "synlm parse model_cards/gpst-tiny ../x -"),
]


@pytest.mark.parametrize(("command", "public"), COMMANDS)
def test_commands_on_cards_have_no_folders_of_a_machine(command: str, public: str):
    scores, hardware = {"accuracy": 0.5}, {"device_name": "x", "device": "cpu", "num_threads": 1}
    result = EvaluationResult("pairs", scores, {"name": "m"}, {}, {}, hardware=hardware, command=command)
    assert [row["command"] for row in card_rows(result)] == [public]


def test_push_names_what_is_wrong(tmp_path: Path, capsys):
    folder = tmp_path / "model"
    assert main(["export", str(CARDS / "palm-s-tiny"), "--out", str(folder)]) == 0
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(CARDS / "rnng-tiny" / name, other)
    for command in (("verify", other), ("push", other, "ann/model", "--dry-run")):
        assert "tokenizer" in fail(capsys, *command)
    for name in ("model", "a b/model", "https://huggingface.co/ann/model"):
        assert main(["push", str(folder), name, "--dry-run", "--no-verify"]) == 2
    facts = yaml.safe_load((folder / "card.yaml").read_text())
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(facts | {"license": None}))
    copy = tmp_path / "copy"
    run(capsys, "export", folder, "--facts", tmp_path / "facts.yaml", "--out", copy)
    push = ("push", copy, "ann/model", "--dry-run", "--no-verify")
    assert "add a line `license: ...` below the first --- of README.md" in remarks(capsys, *push)
    (copy / "README.md").unlink()
    assert "no README.md" in remarks(capsys, *push)


def test_unknown_checkpoint_is_refused(capsys):
    raised(SystemExit, None, make_checkpoints.main, ["gpt-tiny"])
    assert "unknown checkpoint gpt-tiny" in capsys.readouterr().err


def test_nothing_from_outside_and_no_pickle_is_pushed(tmp_path: Path) -> None:
    refused("configuration_prpn.py.*hf_synlm", upload.files_to_push, CARDS / "prpn-syd-tiny")
    folder = export.export_model(*load("prpn-syd-tiny"), tmp_path / "model")
    assert "model.safetensors" in upload.files_to_push(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "opt.bin").write_bytes(b"x")
    refused("opt.bin.*can run code", upload.files_to_push, folder)
    (folder / "sub" / "opt.bin").unlink()
    (tmp_path / "private.txt").write_text("x")
    (folder / "notes.txt").symlink_to(tmp_path / "private.txt")
    refused("notes.txt", upload.files_to_push, folder)
