# SPDX-License-Identifier: Apache-2.0
"""Losses on gold trees beside the loss of any causal language model, in `Trainer`: sentences, batches, and the sum.

The losses are in `treereg.py` and `tree_planting.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Trainer

from hf_synlm.data.collate import LABEL_PADDING, encode_words
from hf_synlm.trees.codecs import pad_inputs


def encode_framed(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> dict[str, list[Any]]:
    """Encode a sentence between special tokens: `input_ids`, and `word_spans`, the half-open tokens of each word.

    The end token of the tokenizer also begins a text if there is no begin token.
    """
    ids, is_end = encode_words(tokenizer, words)
    ends = [token + 2 for token, end in enumerate(is_end) if end]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {
        "input_ids": [end if begin is None else begin, *ids, end],
        "word_spans": list(zip([1, *ends[:-1]], ends, strict=True)),
    }


def pad_framed(rows: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Collate sentences of `encode_framed` into a right-padded batch; `pad_token_id` may be any id.

    Returns `input_ids`, `attention_mask` and `labels` [B, T], and `word_spans` [B, W, 2], padded by (0, 0).
    """
    words = [torch.tensor(row["word_spans"]).view(-1, 2) for row in rows]
    return {
        **pad_inputs((row["input_ids"] for row in rows), pad_token_id),
        # Nobody predicts the first token; `Trainer` counts the labels that are left.
        "labels": pad_sequence(
            [torch.tensor([LABEL_PADDING, *row["input_ids"][1:]]) for row in rows], True, LABEL_PADDING
        ),
        "word_spans": pad_sequence(words, True),
    }


class TreeLossTrainer(Trainer, ABC):
    """`Trainer` of a causal language model that adds a loss on trees, times `weight`, every `every` optimizer steps.

    Evaluation gives the loss of the language model alone. The log has the mean of the added loss. Subclasses set the
    fields and implement `tree_loss`.
    """

    loss_name: str
    """Of the added loss, in the log."""
    tree_inputs: tuple[str, ...]
    """Parts of a batch that the model does not know."""
    asks_for: str
    """Argument of the model that gives what the loss reads."""

    def __init__(self, *args: Any, weight: float, every: int = 1, **options: Any):
        super().__init__(*args, **options)
        self.args.remove_unused_columns = False  # the model's `forward` does not know the trees
        self.weight, self.every = weight, every
        self._tree_losses: list[Tensor] = []

    @abstractmethod
    def tree_loss(self, outputs: Any, trees: dict[str, Tensor]) -> Tensor:
        """The added loss of a batch, a mean over what it counts; `trees` are by the names in `tree_inputs`."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Add the loss on trees in training; see `Trainer.compute_loss`."""
        trees = {name: inputs.pop(name) for name in self.tree_inputs}
        is_due = self.weight and self.state.global_step % self.every == 0
        if not (model.training and is_due):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, {**inputs, self.asks_for: True}, True, num_items_in_batch)
        tree_loss = self.tree_loss(outputs, trees)
        self._tree_losses.append(tree_loss.detach())
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            # The loss of the model is already a part of a mean over all micro batches.
            tree_loss = tree_loss / self.current_gradient_accumulation_steps
        loss = loss + self.weight * tree_loss
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log with the mean of the added loss since the last time."""
        if "loss" in logs and self._tree_losses:
            logs[self.loss_name] = float(torch.stack(self._tree_losses).mean())
            self._tree_losses = []
        super().log(logs, *args, **options)
