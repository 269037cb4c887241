"""The names that users may rely on. ruff (rules ANN) checks that public functions are annotated."""

import importlib.resources

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_synlm

# Taking a name out of these lists, or renaming one, breaks users: write it in CHANGELOG.md.
ARCHITECTURES = (
    "GPST", "LSTM", "ONLSTM", "OrderedMemory", "PCFG", "PRPN", "PaLM", "Pushdown", "RNNG", "TreeLM", "URNNG",
)  # fmt: skip
NOT_CLASSIFIERS = {f"{name}ForSequenceClassification" for name in ("LSTM", "PCFG", "Pushdown", "URNNG")}
KINDS = ("Config", "PreTrainedModel", "Model", "ForCausalLM", "ForSequenceClassification")
OUTPUTS = {"ParseOutput", "SyntacticClassifierOutput", "SyntacticLMOutput", "SyntacticModelOutput"}
PARSER = {"SpanParserConfig", "SpanParserForTokenClassification"}
AUTO_CLASSES = {
    "AutoModel": (AutoModel, "GPSTModel"),
    "AutoModelForCausalLM": (AutoModelForCausalLM, "GPSTForCausalLM"),
    "AutoModelForSequenceClassification": (AutoModelForSequenceClassification, "GPSTForSequenceClassification"),
}


def test_names_are_pinned():
    classes = {architecture + kind for architecture in ARCHITECTURES for kind in KINDS}
    functions = {"average_trees", "parse_sentences", "surprisal"}
    assert set(hf_synlm.__all__) == (classes - NOT_CLASSIFIERS) | OUTPUTS | PARSER | functions
    assert all(hasattr(hf_synlm, name) for name in hf_synlm.__all__)


def test_package_carries_its_type_marker_and_samples():
    files = importlib.resources.files("hf_synlm")
    assert files.joinpath("py.typed").is_file()
    samples = {entry.name for entry in files.joinpath("data", "samples").iterdir()}
    assert {"NOTICE.txt"} < samples, "the embedded text must travel with its licence notice"


@pytest.mark.parametrize("auto_name", sorted(AUTO_CLASSES))
def test_model_is_registered_both_ways(auto_name: str, tiny_gpst_config):
    auto_class, name = AUTO_CLASSES[auto_name]
    own = getattr(hf_synlm, name)
    with torch.device("meta"):
        model = auto_class.from_config(tiny_gpst_config)
    assert type(model) is own, "local use needs no trust_remote_code"
    assert tiny_gpst_config.auto_map[auto_name] == f"{own.__module__.rpartition('.')[2]}.{name}"
