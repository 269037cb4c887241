# SPDX-License-Identifier: Apache-2.0
"""`synlm train PROGRAM`: the training programs without a checkout of the repository.

What follows the name goes to the program as it is. On several devices:
`accelerate launch -m hf_synlm.training.programs.MODULE`.
"""

import importlib
import sys

import typer

# Name of the command -> (module of the program, help).
PROGRAMS = {
    "gpst": ("pretrain_gpst", "Pretrain GPST, or a GPT-2 of the same size, on raw text."),
    "rnng": ("train_rnng", "Train RNNG, or an LSTM or GPT-2, on a treebank."),
    "tree-lm": ("train_tree_lm", "Train a Tree LM or a Transformer Grammar on a treebank."),
    "span-parser": ("train_span_parser", "Train a constituency parser on treebanks, to parse other text."),
    "urnng": ("train_urnng", "Train a URNNG, which learns its trees from words."),
    "pcfg": ("train_pcfg", "Train a neural PCFG (C-PCFG, TN-PCFG, simple PCFG), which learns its trees from words."),
    "treebank-pcfg": ("train_treebank_pcfg", "Count a PCFG in a treebank: exact surprisals and labeled trees."),
    "recurrent": ("train_recurrent", "Train ON-LSTM, PRPN, PaLM, Ordered Memory or AWD-LSTM on treebanks or text."),
    "pushdown": ("train_pushdown", "Train Pushdown Layers on a treebank."),
    "treereg": ("train_treereg", "Train any causal language model of transformers on a treebank with TreeReg."),
    "tree-planting": (
        "train_tree_planting",
        "Train any causal language model of transformers on a treebank with tree-planting.",
    ),
    "ngram": ("train_ngram", "Count the n-grams of a text: the baseline that a model of words has to beat."),
    "glue": ("finetune_glue", "Fine-tune a classifier on GLUE or on a table of labeled texts."),
    "summarization": ("finetune_summarization", "Fine-tune a model to summarize."),
    "induction": ("finetune_grammar_induction", "Fine-tune GPST on the words of a treebank and score its trees."),
}

app = typer.Typer(
    no_args_is_help=True,
    help="Train a model. `synlm train PROGRAM --help` shows the options of a program; `--config` takes a file or the "
    "name of a shipped configuration.",
)


def _add(name: str, module: str, text: str) -> None:
    # Without a help option here, the program answers to --help.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=text, context_settings=settings)
    def run(context: typer.Context) -> None:
        from hf_synlm.training.engine.arguments import list_configs

        if list_configs(module, context.args):  # needs no model
            return
        sys.argv = [f"synlm train {name}", *context.args]
        importlib.import_module("hf_synlm.hub.architectures")  # registers them
        importlib.import_module(f"hf_synlm.training.programs.{module}").main()


for _name, (_module, _text) in PROGRAMS.items():
    _add(_name, _module, _text)
