"""Every way of saving a model writes its code, complete and flat."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging

from hf_synlm.core.configuration_base import SyntacticConfig
from hf_synlm.hub.export import export_model
from hf_synlm.hub.flatten import _flattened, flat_files, flat_name, write_code
from hf_synlm.hub.info import describe_model
from hf_synlm.hub.verify import verify_export
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import model_and_tokenizer

LORA = LoraConfig(target_modules=["ih", "hh"])


@pytest.fixture
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(model_and_tokenizer("on_lstm")[0].config)


def code_in(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}


def by_trainer(model: PreTrainedModel, folder: Path) -> None:
    Trainer(model, TrainingArguments(str(folder), report_to="none", use_cpu=True)).save_model()


def by_peft(model: PreTrainedModel, folder: Path) -> None:
    get_peft_model(model, LORA).merge_and_unload().save_pretrained(folder)


def as_a_subclass(model: PreTrainedModel, folder: Path) -> None:
    class MyConfig(type(model.config)):  # type: ignore[misc]
        pass

    MyConfig().save_pretrained(folder)


def by_config(model: PreTrainedModel, folder: Path) -> None:
    model.config.save_pretrained(folder)


@pytest.mark.parametrize("save", [PreTrainedModel.save_pretrained, by_config, by_trainer, by_peft, as_a_subclass])
def test_saving_writes_the_code(save: Callable[..., None], model: PreTrainedModel, tmp_path: Path):
    save(model, tmp_path)
    assert code_in(tmp_path) == flat_files("on_lstm")


def test_own_classes_are_named_unless_they_are_registered(model: PreTrainedModel, tmp_path: Path, caplog):
    class OwnConfig(type(model.config)):  # type: ignore[misc]
        model_type = "own"

    class Plain(type(model)):  # type: ignore[misc]
        pass

    class Outside(SyntacticConfig):
        model_type = "outside"

        def validate_architecture(self) -> None:
            pass

    logging.enable_propagation()
    OwnConfig().save_pretrained(tmp_path / "config")
    Plain(model.config).save_pretrained(tmp_path / "model")
    Outside().save_pretrained(tmp_path / "outside")
    warned = [record.getMessage() for record in caplog.records if "register_for_auto_class" in record.getMessage()]
    assert all(name in text for name, text in zip(("test_flatten.py", "Plain", "test_flatten.py"), warned, strict=True))
    assert code_in(tmp_path / "config") == code_in(tmp_path / "model") == flat_files("on_lstm")
    assert not code_in(tmp_path / "outside")


def test_imports_of_what_does_not_ship_stay():
    kept = "from hf_synlm.viz import tree_to_text\n    from hf_synlm.hub.loading import load_pretrained\n"
    kept += "from hf_synlm.trees import spans\n"
    flat, modules = _flattened(f"{kept}from hf_synlm.core.rows import Rows\n")
    assert (flat, modules) == (f"{kept}from .rows import Rows\n", ["core.rows"])


def test_a_save_that_is_stopped_leaves_whole_files(model: PreTrainedModel, tmp_path: Path, monkeypatch):
    model.save_pretrained(tmp_path)
    before = code_in(tmp_path)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_code(model.config, tmp_path)
    assert code_in(tmp_path) == before and not list(tmp_path.glob(".*"))


def test_an_adapter_is_saved_without_code(model: PreTrainedModel, tmp_path: Path):
    get_peft_model(model, LORA).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file() and not code_in(tmp_path)
    for read in (describe_model, verify_export):
        refused("is an adapter of PEFT. .*merge_and_unload", read, tmp_path)
    model._hf_peft_config_loaded = True  # as `from_pretrained` of a folder with an adapter sets it
    refused("holds an adapter of PEFT. .*merge_and_unload", export_model, model, None, tmp_path / "out")


def test_names_on_the_hub():
    names = {"core.losses": "losses", "models.gpst.chart": "gpst_chart", "models.gpst.modeling_gpst": "modeling_gpst"}
    assert {module: flat_name(module) for module in names} == names
