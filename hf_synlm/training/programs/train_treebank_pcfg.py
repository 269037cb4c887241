# SPDX-License-Identifier: Apache-2.0
"""Count a PCFG in a treebank: the classical grammar, whose probabilities of next words are exact.

    python training/train_treebank_pcfg.py --train-files train.mrg --validation-files valid.mrg --output-dir runs/pcfg

Rules have their relative frequencies, words a smoothed lexicon with classes of unknown words by spelling. Sentences of
one word are left out. Papers: Hale (NAACL 2001) and Stolcke (Computational Linguistics 1995) for surprisal, Johnson
(Computational Linguistics 1998) for parent annotation.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from hf_synlm.data.arguments import option
from hf_synlm.data.collate import encode_words
from hf_synlm.data.files import check_target
from hf_synlm.data.tokenizers import load_tokenizer
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.data.vocabulary import UnknownRule
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.export import export_model
from hf_synlm.training.engine.arguments import check_minimum, parse_arguments
from hf_synlm.training.engine.runner import tells_errors
from hf_synlm.training.tasks.sentence_files import MIN_FREQUENCY, UNKNOWN_WORDS, SentenceFileArguments
from hf_synlm.training.tasks.stream_batches import boundary_ids
from hf_synlm.training.tasks.tree_evaluation import score_parses
from hf_synlm.training.tasks.treebank_grammar import count_grammar


@dataclass(kw_only=True)
class TreebankPCFGArguments(SentenceFileArguments):
    """The trees, and how they become rules."""

    output_dir: str = option(MISSING, "Folder for the model.")
    overwrite_output_dir: bool = option(False, "Replace the model in the output folder.")
    horizontal_order: int = option(1, "How many children a constituent remembers where it is made binary.")
    parent_annotation: bool = option(True, "Constituents know the label of the constituent that they are in.")
    lexicon_smoothing: float = option(
        1.0, "Words of each preterminal that are added as its tag has them, and of each tag as the text has them."
    )
    tokenizer_min_frequency: int = option(2, MIN_FREQUENCY)
    unknown_words: UnknownRule = option("berkeley2", UNKNOWN_WORDS)

    def __post_init__(self):
        """Check the values."""
        super().__post_init__()
        check_minimum(self, 0, "horizontal_order")
        if not 0 < self.lexicon_smoothing < math.inf:
            raise ValueError(f"lexicon_smoothing is {self.lexicon_smoothing}: it must be finite and above 0.")
        if Path(self.output_dir).exists() and not self.overwrite_output_dir:
            raise ValueError(f"{self.output_dir!r} exists. Choose another output_dir, or pass overwrite_output_dir.")
        check_target(self.output_dir, overwrite=True, inputs=self.files)

    def read(self, split: str) -> list[TreebankSentence]:
        """Trees of two or more words."""
        files = getattr(self, f"{split}_files")
        return [tree for path in files for tree in read_treebank(path, **self.reading) if len(tree.words) > 1]


def run(arguments: TreebankPCFGArguments) -> None:
    """Count, save the model with its tokenizer, and print what it makes of the other trees."""
    train = arguments.read("train")
    words = [tree.words for tree in train]
    name = arguments.tokenizer_name
    tokenizer = load_tokenizer(name) if name else arguments.make_tokenizer(words, end_token=True)
    ids = [encode_words(tokenizer, sentence)[0] for sentence in words]
    if any(len(tokens) != len(sentence) for tokens, sentence in zip(ids, words, strict=True)):
        raise ValueError(f"tokenizer_name {name!r} splits words, but a PCFG reads words. Leave it out.")
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
    for split in ("validation", "test"):
        if gold := arguments.read(split):
            parsed = parse_sentences(model, tokenizer, [tree.words for tree in gold], progress=split)
            print(f"{split}: {score_parses(gold, 'form', parsed, {}, config)[1]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with a command line (default: the process's)."""
    with tells_errors(argv):
        run(*parse_arguments((TreebankPCFGArguments,), argv, description="Count a PCFG in a treebank."))


if __name__ == "__main__":
    main()
