# SPDX-License-Identifier: Apache-2.0
"""`synlm train PROGRAM`: the training programs without a checkout of the repository.

What follows the name goes to the program as it is. On several devices:
`accelerate launch -m hf_synlm.training.programs.MODULE`.
"""

import importlib
import sys

import typer

# Name of the command -> (module of the program, help). The two on `Trainer` of transformers
# take its arguments, which need torch.
PROGRAMS = {
    "gpst": ("pretrain_gpst", "Pretrain GPST, or a GPT-2 of the same size, on raw text."),
    "rnng": ("train_rnng", "Train RNNG, or an LSTM or GPT-2, on a treebank."),
    "tree-lm": ("train_tree_lm", "Train a Tree LM or a Transformer Grammar on a treebank."),
    "span-parser": ("train_span_parser", "Train a constituency parser on treebanks, to parse other text."),
    "urnng": ("train_urnng", "Train a URNNG, which learns its trees from words."),
    "pcfg": ("train_pcfg", "Train a neural PCFG (C-, TN- or simple PCFG), which learns its trees from words."),
    "treebank-pcfg": ("train_treebank_pcfg", "Count a PCFG in a treebank: exact surprisals and trees."),
    "recurrent": ("train_recurrent", "Train ON-LSTM, PRPN, PaLM, Ordered Memory or AWD-LSTM on trees or text."),
    "pushdown": ("train_pushdown", "Train Pushdown Layers on a treebank."),
    "treereg": ("train_treereg", "Train any causal language model of transformers on a treebank with TreeReg."),
    "tree-planting": ("train_tree_planting", "Train any causal language model on a treebank with tree-planting."),
    "ngram": ("train_ngram", "Count the n-grams of a text: the baseline that models have to beat."),
    "glue": ("finetune_glue", "Fine-tune a classifier on GLUE or on a table of labeled texts."),
    "summarization": ("finetune_summarization", "Fine-tune a model to summarize."),
    "induction": ("finetune_grammar_induction", "Fine-tune GPST on words of a treebank and score trees."),
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
        from hf_synlm.training.arguments.base import list_configs, parse_arguments
        from hf_synlm.training.arguments.command_lines import COMMAND_LINES

        if list_configs(module, context.args):
            return
        sys.argv = [f"synlm train {name}", *context.args]
        read = {}
        if module in COMMAND_LINES:  # help and wrong options need no model
            read["parsed"] = parse_arguments(COMMAND_LINES[module].values(), description=text)
        importlib.import_module("hf_synlm.hub.architectures")  # registers them
        importlib.import_module(f"hf_synlm.training.programs.{module}").main(**read)


for _name, _program in PROGRAMS.items():
    _add(_name, *_program)
