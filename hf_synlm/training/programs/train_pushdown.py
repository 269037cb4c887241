# SPDX-License-Identifier: Apache-2.0
"""Train Pushdown Layers on a treebank.

    accelerate launch training/train_pushdown.py --config pushdown_tiny --output_dir runs/pushdown

Trees, batches, evaluation and options are those of `train_rnng`: the same sentences in the same order, so that runs can
be compared. The trees are binarized to the right. Paper: Murty et al., "Pushdown Layers: Encoding Recursive Structure
in Transformer Language Models" (EMNLP 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_synlm.core.losses import share_of
from hf_synlm.data.arguments import option
from hf_synlm.data.collate import LABEL_PADDING, pad_inputs
from hf_synlm.data.gold_trees import gold_attachments
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.programs.train_rnng import RNNGModelArguments, RNNGRecipe
from hf_synlm.trees.spans import fold_tokens
from hf_synlm.trees.transitions import TransitionSystem


@dataclass
class PushdownModelArguments(RNNGModelArguments):
    """Pushdown Layers."""

    presets = {"pushdown": "pushdown-bllip"}

    architecture: str = option("pushdown", "'pushdown'.")


@dataclass
class AttachmentCollator:
    """Encoded sentences -> a right-padded batch with attachments.

    Each sentence ends with the ids of `closing` and their attachments (see `PushdownConfig.closing`).
    """

    pad_token_id: int
    closing: dict[int, int]
    system: TransitionSystem

    def __call__(self, rows: Sequence[dict[str, list]]) -> dict[str, Any]:
        """Collate rows: the arguments of `forward`, and the number of words, `num_words`."""
        attachments = [torch.tensor([*self._attachments(row), *self.closing.values()]) for row in rows]
        return {
            **pad_inputs(([*row["input_ids"], *self.closing] for row in rows), self.pad_token_id),
            "attachments": pad_sequence(attachments, True, LABEL_PADDING),
            "num_words": torch.tensor(sum(sum(row["word_ends"]) for row in rows)),
        }

    def _attachments(self, row: dict[str, list]) -> list[int]:
        spans = [(i, j) for _, i, j in self.system.actions_to_spans(row["actions"])]
        return gold_attachments(fold_tokens(spans, row["word_ends"]), row["word_ends"])


def attachment_objective(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a micro batch, and detached: its parts in nats over the batch with what they count; as `Objective`."""
    batch = dict(batch)
    words = batch.pop("num_words").float()
    output = model(**batch)
    tokens, actions = batch["attention_mask"].sum().float(), (batch["attachments"] >= 0).sum().float()
    shares, parts = batch.get("loss_shares"), {"word": ("language_model", tokens), "action": ("attachment", actions)}
    nats = {f"{key}_nats": output.losses[n] * (count / share_of(shares, n)) for key, (n, count) in parts.items()}
    return output.loss, {"words": words, "tokens": tokens, "actions": actions, **nats}


class PushdownRecipe(RNNGRecipe):
    """Train Pushdown Layers on gold trees by teacher forcing; keep the best validation likelihood."""

    program = "train_pushdown"
    model_arguments: PushdownModelArguments
    _is_grammar = True

    def check(self) -> None:
        """Refuse beams of actions, too."""
        super().check()
        for name in ("action_beam_size", "fast_track_size"):
            if getattr(self.evaluation, name) is not None:
                raise ValueError(f"{name} is a beam of RNNG; Pushdown Layers have num_beams alone. Leave it out.")

    def load(self) -> PreTrainedModel:
        """Read and encode the trees, make or load tokenizer and model."""
        model = super().load()
        self.objective = attachment_objective
        return model

    def collator(self) -> AttachmentCollator:
        """Batches with the attachments of the trees."""
        system = TransitionSystem("top_down", len(self.labels))
        return AttachmentCollator(self.tokenizer.pad_token_id, self.config.closing, system)


main = partial(run_recipe, PushdownRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
