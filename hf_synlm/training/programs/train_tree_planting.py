"""Train any causal language model of transformers on a treebank with tree-planting, by `Trainer`.

    python training/train_tree_planting.py --config tree_planting_tiny --output_dir runs/planted

Models and options are those of `train_treereg.py`, with `--planting_layer`, `--planting_head` and `--planting_weight`;
`--planting_weight 0` trains the same model on the same sentences without the trees. At the end, perplexity and the loss
of tree-planting are measured on the validation sentences. Paper: Yoshida, Someya and Oseki, "Tree-Planted Transformers:
Unidirectional Transformer Language Models with Implicit Syntactic Supervision" (Findings of ACL 2024).
"""

from collections.abc import Sequence
from typing import Any

import torch

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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with a command line (default: the process's)."""
    planting, options, pad, _ = prepare_training(
        argv,
        "tree-planting",
        TreePlantingArguments,
        lambda tokenizer, tree: encode_sentence(tokenizer, tree.words, tree.labeled_spans),
    )
    trainer = TreePlantingTrainer(planting=planting, data_collator=TreePlantingCollator(pad), **options)
    train_and_measure(trainer, lambda: {"eval_planting_loss": measure_planting(trainer, options["eval_dataset"])})


if __name__ == "__main__":
    main()
