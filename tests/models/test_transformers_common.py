"""transformers' own tests of models and configurations, run on all architectures and the LSTM.

Which of them do not apply is said in `transformers_skips`, with reasons. The tests come from the source distribution
of the installed version (`transformers_tests`); without it this module fails.
"""

import copy
import functools
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.utils import logging

import hf_synlm
from tests.helpers import transformers_tests
from tests.helpers.architectures import batch, build
from tests.helpers.transformers_skips import ARCHITECTURES, DERIVATIONS, SKIPS, skip_of

PREFIXES = {
    "gpst": "GPST", "rnng": "RNNG", "tree_lm": "TreeLM", "urnng": "URNNG", "pushdown": "Pushdown", "pcfg": "PCFG",
    "on_lstm": "ONLSTM", "prpn": "PRPN", "palm": "PaLM", "ordered_memory": "OrderedMemory", "lstm": "LSTM",
}  # fmt: skip
KINDS = ("Model", "ForCausalLM", "ForSequenceClassification")
# Tests that ask for attention weights without saying "eager".
WITH_ATTENTIONS = ("test_capture_outputs_decorator", "test_model_outputs_equivalence")
MISSING = transformers_tests.missing()


@pytest.fixture(autouse=True)
def warnings_are_logged() -> Iterator[None]:
    """Whatever libraries that other tests have imported did to the logging of transformers: some tests read it."""
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    yield
    logging.set_verbosity(before)


class Tester:
    """A small model of an architecture and a batch for it, under the names that the tests ask for.

    Args:
        config: of the model.
        inputs: arguments of `forward`.
        width: of the first hidden states.
        num_states: number of hidden states.
    """

    __test__ = False  # for pytest
    is_training = True

    def __init__(self, config: Any, inputs: dict[str, torch.Tensor], width: int, num_states: int) -> None:
        self.config, self.inputs = config, inputs
        self.batch_size, self.seq_length = inputs["input_ids"].shape
        self.hidden_size, self.num_hidden_layers = width, config.num_hidden_layers
        self.expected_num_hidden_layers = num_states

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Copies of both."""
        return copy.deepcopy(self.config), {name: value.clone() for name, value in self.inputs.items()}


def make_tester(architecture: str, test: str) -> Tester:
    """The small model that an architecture is tested with in a test."""
    fields: dict[str, Any] = {"num_layers": 2} if architecture in ("on_lstm", "prpn", "palm", "lstm") else {}
    if architecture == "gpst":
        # One test leaves the special tokens out of the configuration: the default ones need a large vocabulary.
        size = 50264 if test == "test_model_forward_default_config_values" else 40
        fields = {"num_token_layers": 1, "vocab_size": size, "objective_weight": 1.0}  # all weights get gradients
    # Variants that have all parts.
    name = {"on_lstm": "on_lstm, shared", "pcfg": "pcfg, compound"}.get(architecture, architecture)
    config, inputs = build(name, **fields).config, batch(name, 5, 5, 5)
    del inputs["attention_mask"]
    num_states = config.num_hidden_layers + 1 + (architecture in ("rnng", "prpn"))
    width = config.embedding_size if architecture in ("rnng", "lstm") else config.hidden_size
    tester = Tester(config, inputs, width, 1 if architecture == "urnng" else num_states)
    if architecture == "gpst":
        config._attn_implementation = "eager" if test in WITH_ATTENTIONS else config._attn_implementation
        tester.num_attention_heads = config.num_attention_heads
        if test == "test_attention_outputs":
            tester.encoder_seq_length = 2 * tester.seq_length  # the type layers read all nodes of a tree
    return tester


def model_tests(modeling: Any, architecture: str) -> type:
    """transformers' tests of models for one architecture."""

    class ModelTests(modeling.ModelTesterMixin, unittest.TestCase):
        all_model_classes = tuple(
            getattr(hf_synlm, PREFIXES[architecture] + kind)
            for kind in KINDS
            if hasattr(hf_synlm, PREFIXES[architecture] + kind)
        )
        has_attentions = architecture == "gpst"
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            self.model_tester = make_tester(architecture, self._testMethodName)

        def skipTest(self, reason: Any) -> None:
            self.fail(f"This test skips itself ({reason}); if that is right, say so in transformers_skips.py")

        def _prepare_for_class(self, inputs_dict: Any, model_class: Any, return_labels: bool = False) -> Any:
            inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
            if architecture in (*DERIVATIONS, "pcfg") and "labels" in inputs and inputs["labels"].dim() == 2:
                inputs["labels"] = inputs["input_ids"].clone()  # nothing else can be learned from sums over trees
            return inputs

    for name in dir(ModelTests):
        test, skip = getattr(ModelTests, name), skip_of(architecture, name)
        if name.startswith("test_") and callable(test) and skip is not None:
            setattr(ModelTests, name, _without(test, skip.classes) if skip.classes else None)
    ModelTests.__name__ = ModelTests.__qualname__ = f"Test{PREFIXES[architecture]}"
    return ModelTests


def _without(test: Any, endings: tuple[str, ...]) -> Any:
    """A test that leaves out some classes."""

    @functools.wraps(test)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.all_model_classes = tuple(c for c in self.all_model_classes if not c.__name__.endswith(endings))
        return test(self, *args, **kwargs)

    return run


def test_the_tests_of_transformers_are_there() -> None:
    assert MISSING is None, MISSING


def _all_tests(modeling: Any) -> list[str]:
    mixin = modeling.ModelTesterMixin
    return [name for name in dir(mixin) if name.startswith("test_") and callable(getattr(mixin, name))]


if MISSING is None:
    MODELING, CONFIGURATION = transformers_tests.load(tuple(PREFIXES.values()))
    globals().update({f"Test{PREFIXES[name]}": model_tests(MODELING, name) for name in ARCHITECTURES})

    def test_every_skip_leaves_something_out() -> None:
        names = _all_tests(MODELING)
        for skip in SKIPS:
            for architecture in skip.architectures:
                used = any(skip_of(architecture, name) is skip for name in names)
                assert used, f"{architecture} has no test {skip.tests}"

    def test_nothing_is_left_out_by_chance() -> None:
        for architecture in ARCHITECTURES:
            tests = globals()[f"Test{PREFIXES[architecture]}"]
            for name in _all_tests(MODELING):
                skipped = getattr(getattr(tests, name), "__unittest_skip__", False)
                assert not skipped, f"{architecture}, {name}: say why in tests/helpers/transformers_skips.py"

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_configuration(architecture: str) -> None:
        config_class = getattr(hf_synlm, PREFIXES[architecture] + "Config")
        fields = {"vocab_size": 60000, "initializer_range": 0.03}
        tests = CONFIGURATION.ConfigTester(unittest.TestCase(), config_class=config_class, **fields)
        tests.common_properties = ["num_hidden_layers"]
        tests.run_common_tests()
