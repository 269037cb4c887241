# SPDX-License-Identifier: Apache-2.0
"""The arguments of every program that runs a `Recipe` or counts; those on `Trainer` of transformers need torch."""

from functools import partial

from hf_synlm.training.arguments import contexts, finetuning, text, treebank
from hf_synlm.training.arguments.base import TrainingArguments


def parts_of(model: type, data: type, arguments: type = TrainingArguments, **others: type) -> dict[str, type]:
    """Arguments of a recipe, by the attribute that holds them, in the order of the help."""
    return {"model_arguments": model, "data": data, **others, "arguments": arguments}


_of_grammar = partial(parts_of, data=treebank.TreeDataArguments, evaluation=treebank.EvaluationArguments)

# Program -> its arguments, by the attribute of the recipe that holds them.
COMMAND_LINES: dict[str, dict[str, type]] = {
    "pretrain_gpst": parts_of(
        contexts.GPSTModelArguments, contexts.DataArguments, evaluation=contexts.EvaluationArguments
    ),
    "train_ngram": {"arguments": contexts.NGramArguments},
    "train_rnng": _of_grammar(treebank.RNNGModelArguments),
    "train_tree_lm": _of_grammar(treebank.TreeLMModelArguments),
    "train_pushdown": _of_grammar(treebank.PushdownModelArguments),
    "train_urnng": parts_of(
        treebank.URNNGModelArguments,
        treebank.TreeDataArguments,
        treebank.URNNGTrainingArguments,
        variational=treebank.VariationalArguments,
    ),
    "train_span_parser": parts_of(treebank.SpanParserModelArguments, treebank.SpanDataArguments),
    "train_treebank_pcfg": {"arguments": treebank.TreebankPCFGArguments},
    "train_recurrent": parts_of(
        text.RecurrentModelArguments,
        text.StreamDataArguments,
        text.RecurrentTrainingArguments,
        parsing=text.ParsingArguments,
        schedule=text.ScheduleArguments,
    ),
    "train_pcfg": parts_of(
        text.PCFGModelArguments,
        text.PCFGDataArguments,
        text.PCFGTrainingArguments,
        parsing=text.PCFGParsingArguments,
        curriculum=text.CurriculumArguments,
    ),
    "finetune_glue": parts_of(finetuning.ModelArguments, finetuning.GlueArguments),
    "finetune_summarization": parts_of(
        finetuning.ModelArguments, finetuning.SummaryArguments, decoding=finetuning.DecodingArguments
    ),
    "finetune_grammar_induction": parts_of(finetuning.ModelArguments, finetuning.InductionArguments),
}
