"""Files of unknown origin cannot run code, exhaust the machine or lead elsewhere, and secrets stay where they are."""

import ast
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_synlm
from hf_synlm.cli import main
from hf_synlm.data.brackets import brackets_to_labeled_spans, brackets_to_spans
from hf_synlm.data.files import find_model
from hf_synlm.data.parsed import read_parse
from hf_synlm.data.treebank import parse_treebank
from hf_synlm.evaluation.suites.formulas import Formula
from hf_synlm.evaluation.suites.syntaxgym import load_suite
from hf_synlm.hub.checkpoint import check_complete, check_model_source, check_tokenizer_source, is_folder
from hf_synlm.hub.export import export_model
from hf_synlm.hub.info import describe_model
from hf_synlm.hub.loading import check_checkpoint, load_checked_tokenizer, load_pretrained, saved_auto_class
from hf_synlm.trees.actions import spans_to_actions
from hf_synlm.trees.binary import actions_to_spans
from hf_synlm.trees.spans import in_post_order
from hf_synlm.trees.transitions import TransitionSystem
from tests.evaluation.test_syntaxgym import suite_data
from tests.helpers.commands import fail, run
from tests.helpers.refusals import raised, refused
from tests.reference.trees import stack_depths

ROOT = Path(__file__).parents[2]


OWN_PICKLE = "torch.load(path, mmap=True, weights_only=False)"


def test_nothing_is_unpickled():
    """What ruff (rules S) does not see: pickles inside of `torch.load`, `numpy.load`, joblib and dill.

    The pickles of compound-pcfg go through an unpickler that refuses all classes but those of its models, and takes
    empty ones in their place (`tests/conversion/test_pcfg_conversion.py` attacks it).
    Workers load what the process that starts them has just written into a private folder; as with every pool of
    processes, tasks and results are pickles, too.
    """
    for file in (path for folder in ("hf_synlm", "training") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                options = {option.arg: ast.unparse(option.value) for option in node.keywords}
                place, function = f"{file.name}:{node.lineno}", ast.unparse(node.func)
                own = file.name == "processes.py" and ast.unparse(node) == OWN_PICKLE
                own |= file.parts[-2:] == ("conversion", "pcfg.py") and options.get("pickle_module") == "reader"
                assert own or function != "torch.load" or options.get("weights_only") == "True", place
                assert "allow_pickle" not in options, place
                assert function not in {"joblib.load", "dill.load", "dill.loads", "shelve.open"}, place


# ------------------------------------------------------------------------------------------- malicious checkpoints
@pytest.fixture
def checkpoint(saved_models: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_models / "gpst", tmp_path / "model")


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def change_config(folder: Path, **fields: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **fields}))


def refusal(folder: Path) -> str:
    """What the loader says; it must not take long, nor anything else than a ValueError."""
    with pytest.raises(ValueError) as caught:
        load_pretrained(str(folder))
    message = str(caught.value)
    assert ("\n" not in message and str(folder) in message) or "Is the configuration damaged?" in message
    return message


class TestMaliciousCheckpoints:
    def test_pickled_weights_run_nothing(self, checkpoint: Path, tmp_path: Path, capsys):
        target = tmp_path / "made_by_payload"
        (checkpoint / "model.safetensors").unlink()
        torch.save({"model.norm.weight": Payload(target)}, checkpoint / "pytorch_model.bin")
        assert "could run foreign code" in refusal(checkpoint) and "weights_only" not in refusal(checkpoint)
        assert main(["convert", "gpst", "--weights", str(checkpoint / "pytorch_model.bin"), "--config",
                     str(checkpoint / "config.json"), "--out", str(tmp_path / "converted")]) == 2  # fmt: skip
        assert "pytorch_model.bin" in run(capsys, "info", checkpoint)
        assert main(["parse", os.devnull, "--model", str(checkpoint)]) == 2
        assert not target.exists() and not (tmp_path / "converted").exists()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"vocab_size": 400}, r"\[330, 24\] instead of \[400, 24\]"),
            ({"vocab_size": 10**9}, "instead of"),  # 96 GB
            ({"vocab_size": 10**18}, "vocab_size is 10+, which is more than"),
            ({"num_token_layers": 10**9}, "num_token_layers is 10+, which is more than 1000"),
            ({"hidden_size": "24; rm"}, "Field 'hidden_size' expected int"),
            ({"activation_function": "os.system"}, "activation_function 'os.system' is unknown"),
            ({"height_loss": ["sentence"]}, "height_loss"),
            ({"__class__": "os.system"}, "must be set to a class"),
            ({"bos_token_id": 10**6}, "not in the vocabulary"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_absurd_configurations(self, checkpoint: Path, fields: dict, message: str):
        change_config(checkpoint, **fields)
        refused(message, load_pretrained, str(checkpoint))
        refused(message, check_checkpoint, checkpoint)

    def test_unknown_values_change_nothing(self, checkpoint: Path):
        change_config(checkpoint, favourite="blue", _attn_implementation=None)
        loaded, _ = load_pretrained(str(checkpoint))
        assert type(loaded).__module__ == "hf_synlm.models.gpst.modeling_gpst"

    @pytest.mark.parametrize("content", ["{", "[]", "null", '"config"', "[" * 100_000, "\ud800"])
    def test_config_that_is_no_object(self, checkpoint: Path, content: str):
        (checkpoint / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        assert "config.json" in refusal(checkpoint)
        refused("config.json", check_complete, checkpoint)

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data[: len(data) // 2],
            lambda data: (2**62).to_bytes(8, "little") + data[8:],
            lambda data: (10).to_bytes(8, "little") + b'{"a": [1]}',
            lambda data: data[:8] + bytes(len(data) - 8),
            lambda data: b"",
        ],
        ids=["truncated", "huge header", "header of something else", "zeros", "empty"],
    )
    def test_damaged_weights(self, checkpoint: Path, change: Any):
        file = checkpoint / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))
        assert str(file) in refusal(checkpoint)

    @pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin"])
    def test_shards_stay_in_the_folder(self, checkpoint: Path, name: str):
        (checkpoint / "model.safetensors").rename(checkpoint.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "shards are .safetensors files beside it" in refusal(checkpoint)

    @pytest.mark.parametrize(
        "reference", ["../evil.Model", "os.system.call", "owner/code--../file.Model", 3, ["a.B", None]]
    )
    def test_code_stays_in_the_folder(self, checkpoint: Path, reference: Any):
        change_config(checkpoint, auto_map={"AutoModel": reference})
        refused("Code must lie in the folder itself", check_complete, checkpoint)

    def test_only_auto_classes_are_looked_up(self, checkpoint: Path):
        change_config(checkpoint, auto_map={"logging": "modeling_gpst.GPSTForCausalLM"})
        assert saved_auto_class(str(checkpoint)) is AutoModelForCausalLM

    def test_local_code_is_not_replaced_by_that_of_a_folder(self, checkpoint: Path, tmp_path: Path):
        target = tmp_path / "made_by_code"
        for file in checkpoint.glob("*.py"):
            file.write_text(f"import os\nos.mkdir({str(target)!r})\n" + file.read_text())
        load_pretrained(str(checkpoint))
        assert main(["info", str(checkpoint)]) == 0
        assert not target.exists()


# ---------------------------------------------------------------------------------------------------------- names
class TestNames:
    """What is no model is told before the Hub is asked."""

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch, tmp_path: Path):
        """Fail at once where the Hub would be asked, and stand in an empty folder but for `cards`."""
        for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
            monkeypatch.setattr(kind, "from_pretrained", lambda name, **options: pytest.fail(f"{name} is loaded"))
        (tmp_path / "cards").mkdir()
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("name", ["./no", "../no", ".", "/no", "/no/no/x", "~/no", "a/b/c", "cards/"])
    def test_folders_that_are_none(self, name: str, capsys):
        message = "there is no folder" if not Path(name).is_dir() else "is not a model folder: it has no config.json"
        for load in (load_pretrained, saved_auto_class, describe_model, check_model_source):
            refused(message, load, name)
        assert message in fail(capsys, "generate", "--prompt", "We", "--model", name)

    @pytest.mark.parametrize("name", ["gpt2", "org/name", "cards/no"])
    def test_names_on_the_hub(self, name: str, monkeypatch):
        assert not is_folder(name)
        for load in (load_pretrained, load_checked_tokenizer, saved_auto_class, describe_model, check_model_source):
            refused(f"'{name}' is not a folder, and the Hub cannot be asked", load, name)
        Path("cards/gpst-mini").mkdir()
        refused("did you mean cards/gpst-mini", load_pretrained, "cards/gpst-mni")
        monkeypatch.setattr(HfApi, "model_info", lambda *name, **options: None)
        raised(pytest.fail.Exception, f"{name} is loaded", load_pretrained, name, revision="v1")

    def test_output_folders_of_training(self, checkpoint: Path, caplog, monkeypatch):
        monkeypatch.undo()
        run = checkpoint.parent / "run"
        for step in ("step_9", "step_10"):
            (run / step).mkdir(parents=True)
            (run / step / "training_state.json").write_text("{}")
        for name, newest in ((run, "step_10"), (run / "step_9", "step_9")):
            refused(rf"`synlm export \S+run/{newest} --out FOLDER`, or wait until", load_pretrained, str(name))
        checkpoint.rename(run / "model")
        assert find_model(run / "model") == str(run / "model") and not caplog.messages
        assert load_pretrained(str(run))[0].name_or_path == str(run / "model")
        assert describe_model(run)["model"] == str(run / "model")
        assert {message.split(": ")[1] for message in caplog.messages} == {f"its model is taken, {run / 'model'}"}

    def test_folders_without_a_tokenizer(self, checkpoint: Path, tmp_path: Path):
        for file in checkpoint.glob("tokenizer*"):
            file.unlink()
        message = "model' holds no tokenizer .tokenizer.json, tokenizer_config.json.. Save it there by"
        for load in (load_pretrained, load_checked_tokenizer, check_tokenizer_source):
            refused(message, load, str(checkpoint))
        for file in ("vocab.txt", "spm.model", "source.spm", "tekken.json", "dict.txt"):  # of other tokenizers
            (checkpoint / file).touch()
            check_tokenizer_source(checkpoint)
            (checkpoint / file).unlink()
        (checkpoint / "vocab.txt").touch()
        check_tokenizer_source(tmp_path, subfolder=checkpoint.name)

    def test_other_folders_of_models(self, checkpoint: Path, tmp_path: Path):
        check_model_source(tmp_path, subfolder=checkpoint.name)
        (tmp_path / "adapter_config.json").touch()
        check_model_source(tmp_path)

    def test_folders_have_no_revisions(self, checkpoint: Path):
        for load in (load_pretrained, saved_auto_class, describe_model):
            refused("revision 'v1': .* has no revisions. Leave revision out", load, str(checkpoint), revision="v1")


# -------------------------------------------------------------------------------------------------------- secrets
class TestSecrets:
    TOKEN = "hf_" + "SecretOfATest" * 2

    def test_tokens_are_not_saved(self, checkpoint: Path, tmp_path: Path, monkeypatch, capfd, caplog):
        monkeypatch.setenv("HF_TOKEN", self.TOKEN)
        model, tokenizer = load_pretrained(str(checkpoint), token=self.TOKEN)
        folder = export_model(model, tokenizer, tmp_path / "again")
        assert main(["export", str(checkpoint), "--out", str(tmp_path / "by_command")]) == 0
        assert main(["push", str(tmp_path / "nowhere"), "org/name"]) == 2
        for file in (*folder.iterdir(), *(tmp_path / "by_command").iterdir()):
            assert self.TOKEN.encode() not in file.read_bytes(), file.name
        captured = capfd.readouterr()
        assert self.TOKEN not in captured.out + captured.err + caplog.text

    def test_push_takes_no_token_on_the_command_line(self, capsys):
        assert main(["push", "folder", "org/name", "--token", self.TOKEN]) == 2
        capsys.readouterr()


# ----------------------------------------------------------------------------------------------------- fuzzed input
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BRACKETS = st.text(st.sampled_from('() \tabS-NP*.\n{}[]",:0'), max_size=60) | st.text(max_size=30)
NUMBERS = st.integers(-3, 9) | st.integers()
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def only_value_errors(function: Any, *arguments: Any) -> None:
    """Anything but success or a ValueError fails the test."""
    try:
        function(*arguments)
    except ValueError as error:
        assert str(error), "a message is missing"


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one of its parts replaced by anything, or left out."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 4)):
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: draw(changed(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(changed(value[place])), *value[place + 1 :]]
    return draw(JSON)


class TestFuzz:
    @FUZZ
    @given(BRACKETS)
    def test_trees(self, text: str):
        only_value_errors(brackets_to_spans, text)
        only_value_errors(brackets_to_labeled_spans, text)
        only_value_errors(lambda: list(parse_treebank(text.splitlines())))
        for style in ("unlabeled", "labeled", "treebank"):
            only_value_errors(read_parse, text, style)

    @FUZZ
    @given(st.dictionaries(st.sampled_from(["words", "trees", "word_log_probs", "spans"]), JSON, max_size=4))
    def test_parses_in_json(self, values: dict):
        only_value_errors(read_parse, json.dumps(values))

        only_value_errors(read_parse, json.dumps({"words": ["a", "b"], "trees": [values]}))

    @FUZZ
    @given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), st.integers(-2, 8))
    def test_spans(self, spans: list, num_tokens: int):
        only_value_errors(in_post_order, spans, num_tokens)
        only_value_errors(spans_to_actions, spans, num_tokens)
        for name in ("top_down", "in_order"):
            only_value_errors(TransitionSystem(name, 2).spans_to_actions, [(0, i, j) for i, j in spans], num_tokens)

    @FUZZ
    @given(st.lists(st.integers(-2, 6) | st.integers(), max_size=12), st.none() | st.lists(st.booleans(), max_size=6))
    def test_actions(self, actions: list, word_ends: list | None):
        only_value_errors(actions_to_spans, actions)
        for name in ("top_down", "in_order"):
            only_value_errors(TransitionSystem(name, 2).actions_to_spans, actions, word_ends)
            only_value_errors(stack_depths, TransitionSystem(name, 2), actions, word_ends)

    @FUZZ
    @given(st.text(st.sampled_from("()[]<>=&|+-*;%a1. "), max_size=40))
    def test_formulas(self, text: str):
        only_value_errors(Formula, text)

    @pytest.mark.parametrize(
        "text", ["(" * 50_000, "1+" * 140 + "1<2", "-" * 50_000 + "1", "((1<2)&" * 50_000, "1" * 50_000 + "<2"]
    )
    def test_deep_formulas(self, text: str):
        only_value_errors(lambda: Formula(text)({}))

    @FUZZ
    @given(changed(suite_data()))
    def test_suites(self, tmp_path: Path, suite: Any):
        file = tmp_path / "suite.json"
        file.write_text(json.dumps(suite), encoding="utf-8", errors="surrogatepass")
        only_value_errors(load_suite, file)

    @pytest.mark.parametrize("name", [name for name in hf_synlm.__all__ if name.endswith("Config")])
    @FUZZ
    @given(st.data())
    def test_configurations(self, name: str, data: st.DataObject):
        config_class = getattr(hf_synlm, name)
        fields = [field for field in config_class().to_dict() if field in config_class.__annotations__]
        chosen = data.draw(st.dictionaries(st.sampled_from(fields), JSON, max_size=3))
        try:
            config_class(**chosen)
        except ValueError as error:
            assert str(error)
        except StrictDataclassError as error:  # huggingface_hub's own, for values of a wrong type
            assert str(error)

    def test_deep_parses_in_json(self):
        refused("nested too deep", read_parse, '{"words":' * 100_000)
