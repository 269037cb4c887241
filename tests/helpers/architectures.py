"""Small models of every architecture and batches for them, for the tests of what all of them promise alike."""

import random
from typing import Any

import torch
from torch import Tensor

import hf_synlm
from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.trees.actions import spans_to_actions
from hf_synlm.trees.codecs import tree_attachments
from tests.helpers import recurrent_models
from tests.models.gpst import test_modeling_gpst
from tests.models.pcfg import test_modeling_pcfg
from tests.models.pcfg.test_modeling_pcfg import PCFGS
from tests.models.pushdown import test_modeling_pushdown
from tests.models.rnng import test_modeling_rnng
from tests.models.tree_lm import test_modeling_tree_lm
from tests.models.urnng import test_modeling_urnng

# Name -> fields of the configuration.
RNNGS = {
    "rnng": {"composition": "lstm"},
    "rnng, attention": {"composition": "attention"},
    "rnng, in-order": {"transition_system": "in_order", "composition": "lstm"},
    "rnng, in-order, attention": {"transition_system": "in_order", "composition": "attention"},
}
TREE_LMS = {
    "tree_lm": {"structure_attention": "stack_compose"},
    **{f"tree_lm, {x}": {"structure_attention": x} for x in test_modeling_tree_lm.STRUCTURES if x != "stack_compose"},
}
# So that searches are short.
LIMITS = {"max_open_nonterminals": 6, "max_consecutive_nonterminals": 2}
SEARCHING = ("gpst", *RNNGS, *TREE_LMS, "urnng", "pushdown")
RECURRENT = tuple(recurrent_models.MODELS)
EVERY = (*SEARCHING, *PCFGS, *RECURRENT)
# One of each, in the order of the documentation.
ARCHITECTURES = (
    "gpst", "rnng", "tree_lm", "urnng", "pushdown", "pcfg", "on_lstm, shared", "prpn", "palm", "ordered_memory", "lstm"
)  # fmt: skip


def build(name: str, kind: str = "ForCausalLM", **fields: Any) -> Any:
    """A small model in evaluation mode."""
    if name == "gpst":
        return test_modeling_gpst.tiny(getattr(hf_synlm, f"GPST{kind}"), **fields)
    if name in RNNGS:
        return test_modeling_rnng.tiny(getattr(hf_synlm, f"RNNG{kind}"), **{**LIMITS, **RNNGS[name], **fields})
    if name in TREE_LMS:
        return test_modeling_tree_lm.tiny(getattr(hf_synlm, f"TreeLM{kind}"), **{**LIMITS, **TREE_LMS[name], **fields})
    if name == "urnng":
        return test_modeling_urnng.tiny(getattr(hf_synlm, f"URNNG{kind}"), **{"vocab_size": 30, **fields})
    if name in PCFGS:
        return test_modeling_pcfg.tiny(getattr(hf_synlm, f"PCFG{kind}"), **{"vocab_size": 30, **PCFGS[name], **fields})
    if name == "pushdown":
        special = {"vocab_size": 23, "bos_token_id": 0, "eos_token_id": 0}
        return test_modeling_pushdown.tiny(cls=getattr(hf_synlm, f"Pushdown{kind}"), **{**special, **fields})
    return recurrent_models.make_model(name, kind, **fields)


def without_dropout(name: str) -> dict[str, float]:
    """Fields of `build` by which nothing is dropped in training."""
    if name == "gpst":
        return test_modeling_gpst.NO_DROPOUT
    return {"rates": 0.0} if name in RECURRENT else {} if name == "pushdown" or name in PCFGS else {"dropout": 0.0}


def batch(name: str, *lengths: int, left: bool = False, pieces: bool = False) -> dict[str, Tensor]:
    """Sentences of unequal length, with trees where `forward` needs them; `pieces` in word pieces, for these models."""
    lengths = lengths or (7, 3, 5)
    if name in RNNGS:
        return test_modeling_rnng.batch(RNNGS[name].get("transition_system", "top_down"), lengths, pieces, left)
    if name in TREE_LMS:
        return test_modeling_tree_lm.batch(lengths, pieces, left, TREE_LMS[name]["structure_attention"])
    make = test_modeling_gpst.ids_of if name == "gpst" else recurrent_models.ids_of
    words = {"words": range(3, 23), "padding": 0} if name in ("urnng", "pushdown", *PCFGS) else {}
    ids, mask = make(*lengths, left=left, **words)
    inputs = {"input_ids": ids, "attention_mask": mask}
    trees = [random_tree(length, random.Random(length)) for length in lengths]
    if name == "urnng":
        rows = [torch.tensor(spans_to_actions(tree, n)) for tree, n in zip(trees, lengths, strict=True)]
        inputs["actions"] = torch.nn.utils.rnn.pad_sequence(rows, True, -1)
    elif name == "pushdown":
        inputs["attachments"] = torch.full_like(ids, -100)
        rows = [tree_attachments(tree, n) for tree, n in zip(trees, lengths, strict=True)]
        inputs["attachments"][mask.bool()] = torch.tensor(sum(rows, []))
    return inputs


def labeled(name: str, *lengths: int, **options: Any) -> dict[str, Tensor]:
    """A batch that trains."""
    inputs = batch(name, *lengths, **options)
    return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def row_of(name: str, inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row of a batch, without padding."""
    tokens = inputs["attention_mask"][row].bool()
    steps = inputs["actions"][row] > (-1 if name == "urnng" else 0) if "actions" in inputs else tokens
    return {key: value[row, steps if key == "actions" else tokens][None] for key, value in inputs.items()}
