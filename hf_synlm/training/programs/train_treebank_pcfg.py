# SPDX-License-Identifier: Apache-2.0
"""Count a PCFG in a treebank: the classical grammar, whose probabilities of next words are exact.

    python training/train_treebank_pcfg.py --train-files train.mrg --validation-files valid.mrg --output-dir runs/pcfg

Rules have their relative frequencies. Words have a smoothed lexicon, with classes of unknown words by spelling.
Sentences of one word are left out. Papers: Hale (NAACL 2001) and Stolcke (Computational Linguistics 1995) for
surprisal, Johnson (Computational Linguistics 1998) for parent annotation.
"""

from collections.abc import Sequence
from typing import Any

from hf_synlm.data.collate import encode_words
from hf_synlm.data.tokenizers import load_tokenizer
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.export import export_model
from hf_synlm.training.arguments.base import parse_arguments
from hf_synlm.training.arguments.treebank import TreebankPCFGArguments
from hf_synlm.training.engine.runner import end_counting, tells_errors
from hf_synlm.training.tasks.stream_batches import boundary_ids
from hf_synlm.training.tasks.tree_evaluation import score_parses
from hf_synlm.training.tasks.treebank_grammar import count_grammar


def run(arguments: TreebankPCFGArguments) -> None:
    """Count, save the model with its tokenizer, and print what it makes of the other trees."""
    train = arguments.read("train")
    words = [tree.words for tree in train]
    name = arguments.tokenizer_name
    tokenizer = load_tokenizer(name) if name else arguments.make_tokenizer(words, end_token=True)
    ids = [encode_words(tokenizer, sentence)[0] for sentence in words]
    if any(len(tokens) != len(sentence) for tokens, sentence in zip(ids, words, strict=True)):
        raise ValueError(f"--tokenizer-name {name!r} splits words, but a PCFG reads words. Leave this option out.")
    model = count_grammar(
        zip(train, ids, strict=True), arguments.horizontal_order, arguments.parent_annotation,
        arguments.lexicon_smoothing, vocab_size=len(tokenizer), text_style="treebank",
        **boundary_ids(tokenizer),
    )  # fmt: skip
    config = model.config
    size = f"{config.num_rules:,} rules, {config.num_nonterminals:,} nonterminals, "
    size += f"{config.num_preterminals:,} preterminals, counted in {len(train):,} trees"
    facts = {
        "training_data": arguments.describe(),
        "training_procedure": f"{size}; horizontal order {arguments.horizontal_order}, "
        f"parent annotation {arguments.parent_annotation}, lexicon smoothing {arguments.lexicon_smoothing}.",
    }
    export_model(model, tokenizer, arguments.output_dir, overwrite=True, facts=facts)
    print(size)
    results: dict[str, Any] = {}
    for split in ("validation", "test"):
        if gold := arguments.read(split):
            parsed = parse_sentences(model, tokenizer, [tree.words for tree in gold], progress=split)
            results[split] = scores = score_parses(gold, "form", parsed, config)
            shown = {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in scores.items()}
            print(f"{split}: {'  '.join(f'{name} {value}' for name, value in shown.items())}")
    end_counting(model, arguments.output_dir, results)


def main(argv: Sequence[str] | None = None, parsed: Any = None) -> None:
    """Run the program with a command line (default: the process's), or with its arguments, `parsed`."""
    with tells_errors(argv):
        run(*(parsed or parse_arguments((TreebankPCFGArguments,), argv, description="Count a PCFG in a treebank.")))


if __name__ == "__main__":
    main()
