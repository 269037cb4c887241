# SPDX-License-Identifier: Apache-2.0
"""Train any causal language model of transformers on a treebank with tree-planting, by `Trainer`.

    python training/train_tree_planting.py --config tree_planting_tiny --output-dir runs/planted

Models and options are those of `train_treereg.py`, with `--planting-layer`, `--planting-head` and `--planting-weight`;
`--planting-weight 0` trains the same model on the same sentences without the trees. At the end, perplexity and the loss
of tree-planting are measured on the validation sentences. Dependency trees (CoNLL-U) are planted as they are, and with
`--tree-structure` as constituents. Paper: Yoshida, Someya and Oseki, "Tree-Planted Transformers: Unidirectional
Transformer Language Models with Implicit Syntactic Supervision" (Findings of ACL 2024).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.dependencies import DependencySentence, drop_punctuation, holds_dependencies, read_conllu
from hf_synlm.data.treebank import PUNCTUATION_TAGS, TreebankSentence, read_treebank
from hf_synlm.training.programs.train_treereg import prepare_training, train_and_measure
from hf_synlm.training.tasks.tree_planting import (
    TreePlantingArguments,
    TreePlantingCollator,
    TreePlantingTrainer,
    encode_sentence,
)


@torch.no_grad()
def measure_planting(trainer: TreePlantingTrainer, examples: list[dict[str, Any]]) -> float:
    """Loss of tree-planting in nats per word: the mean over the words of all sentences, whatever the batches."""
    model, total, count = trainer.model.eval(), 0.0, 0
    for batch in trainer.get_eval_dataloader(examples):
        batch = {name: values.to(model.device) for name, values in batch.items()}
        trees = {name: batch.pop(name) for name in trainer.tree_inputs}
        num_words = int((trees["word_spans"][:, 1:, 1] > 0).sum())
        total += num_words * float(trainer.tree_loss(model(**batch, output_attentions=True), trees))
        count += num_words
    return total / count


def read_trees(path: str, dependencies: Mapping[str, Any]) -> Iterable[TreebankSentence | DependencySentence]:
    """The sentences of a file: dependency trees as they are, where no `structure` of constituents is asked for."""
    if "structure" in dependencies or not holds_dependencies(path):
        return read_treebank(path, dependencies=dependencies)
    if unused := sorted({"labels", "nonprojective"} & {*dependencies}):
        raise ValueError(f"tree_{unused[0]} belongs to constituents. Pass --tree-structure flat, or omit this option.")
    sentences = read_conllu(path, dependencies.get("tokens", "surface"), invalid=dependencies.get("invalid", "refuse"))
    if dependencies.get("punctuation") != "remove":
        return sentences
    return filter(None, (drop_punctuation(sentence, PUNCTUATION_TAGS) for sentence in sentences))


def encode_tree(tokenizer: PreTrainedTokenizerBase, tree: TreebankSentence | DependencySentence) -> dict[str, Any]:
    """The example of a sentence with its tree."""
    if isinstance(tree, DependencySentence):
        return encode_sentence(tokenizer, tree.words, heads=tree.heads)
    return encode_sentence(tokenizer, tree.words, tree.labeled_spans)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with a command line (default: the process's)."""
    planting, options, pad, _ = prepare_training(argv, "tree-planting", TreePlantingArguments, encode_tree, read_trees)
    trainer = TreePlantingTrainer(planting=planting, data_collator=TreePlantingCollator(pad), **options)
    train_and_measure(trainer, lambda: {"eval_planting_loss": measure_planting(trainer, options["eval_dataset"])})


if __name__ == "__main__":
    main()
