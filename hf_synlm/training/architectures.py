# SPDX-License-Identifier: Apache-2.0
"""What is trained, on what, and how: task x learner x architecture. Baselines are rows of this table, too.

A task says what is read, how batches are made and what is measured; a learner how the weights change:

    treebank     tasks/treebank_recipe.py   sentences with gold trees
    brackets     train_span_parser.py       words and the spans of gold trees, for a parser
    text         tasks/text_recipe.py       sentences or a stream of words, and trees to compare with
    contexts     pretrain_gpst.py           whole sentences packed into contexts
    default      engine/recipe.py           AdamW, its rate a function of the step
    phased       train_recurrent.py         optimizers that follow each other from epoch to epoch
    variational  train_urnng.py             SGD for the model, Adam for the network that proposes its trees

Fine-tuning (tables of examples: tasks/finetuning.py) begins with a model of any architecture, as do the two programs on
`Trainer` of transformers (TreeReg, tree-planting).
"""

from typing import Any, NamedTuple

import hf_synlm


class Architecture(NamedTuple):
    """A row of the table."""

    task: str
    learner: str
    model: str | None
    """Name of the class in hf_synlm; `None`: a language model of transformers."""
    preset: str = ""
    """Default preset; empty: the model has none."""
    is_baseline: bool = False
    """Whether the model has no trees."""

    @property
    def model_class(self) -> Any:
        """The class of the model."""
        return getattr(hf_synlm, str(self.model))


# Program -> its architectures.
ARCHITECTURES = {
    "pretrain_gpst": {
        "gpst": Architecture("contexts", "default", "GPSTForCausalLM", "gpst-small"),
        "gpt2": Architecture("contexts", "default", None, is_baseline=True),  # or another model type
    },
    "train_rnng": {
        "rnng": Architecture("treebank", "default", "RNNGForCausalLM", "rnng-15m"),
        "lstm": Architecture("treebank", "default", "LSTMForCausalLM", "lstm-15m", is_baseline=True),
        "gpt2": Architecture("treebank", "default", None, is_baseline=True),
    },
    "train_tree_lm": {"tree_lm": Architecture("treebank", "default", "TreeLMForCausalLM", "txl-trees")},
    "train_pushdown": {"pushdown": Architecture("treebank", "default", "PushdownForCausalLM", "pushdown-bllip")},
    "train_urnng": {"urnng": Architecture("treebank", "variational", "URNNGForCausalLM", "urnng-ptb")},
    "train_span_parser": {"span_parser": Architecture("brackets", "default", "SpanParserForTokenClassification")},
    "train_pcfg": {"pcfg": Architecture("text", "default", "PCFGForCausalLM", "neural-pcfg")},
    "train_recurrent": {
        "on_lstm": Architecture("text", "phased", "ONLSTMForCausalLM", "on-lstm-ptb"),
        "prpn": Architecture("text", "phased", "PRPNForCausalLM", "prpn-ptb-word"),
        "palm": Architecture("text", "phased", "PaLMForCausalLM", "palm-ptb"),
        "ordered_memory": Architecture("text", "phased", "OrderedMemoryForCausalLM", "ordered-memory"),
        "awd_lstm": Architecture("text", "phased", "PaLMForCausalLM", "awd-lstm-ptb", is_baseline=True),
    },
}
