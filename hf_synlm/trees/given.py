# SPDX-License-Identifier: Apache-2.0
"""Checks of what models that are trained on given trees read: derivations, and words that count for the loss.

Shapes: B sentences, T tokens, A actions.
"""

from torch import Tensor


def check_actions(actions: Tensor, mask: Tensor, word_ends: Tensor | None = None, padding: int = 0) -> None:
    """Check the shapes of derivations, and their padding.

    Derivations are [B, A] with padding at the right end only; `mask` and `word_ends` are [B, T].
    """
    if actions.dim() != 2 or len(actions) != len(mask) or actions.is_floating_point():
        raise ValueError(
            f"actions must be integers [batch, actions] for {len(mask)} rows, not {actions.dtype} "
            f"{tuple(actions.shape)}."
        )
    if word_ends is not None and word_ends.shape != mask.shape:
        raise ValueError(f"word_ends {tuple(word_ends.shape)} and input_ids {tuple(mask.shape)} need equal shapes.")
    if bool((actions < padding).any()):
        raise ValueError(f"actions hold {int(actions.min())}: ids below the padding ({padding}) are not allowed.")
    if bool(((actions[:, :-1] == padding) & (actions[:, 1:] != padding)).any()):
        raise ValueError(f"actions have padding ({padding}) before other actions. Pad them at the right end only.")


def counted_words(input_ids: Tensor, labels: Tensor | None, mask_BT: Tensor) -> Tensor:
    """Words [B, T] that count for the loss of a model that generates its own input.

    `labels` are `input_ids`, with -100 where a word does not count; None = all words count.
    """
    if labels is None:
        return mask_BT
    wrong = labels.shape != input_ids.shape or labels.is_floating_point()
    if wrong or bool(((labels != input_ids) & (labels != -100) & mask_BT).any()):
        raise ValueError("labels must be input_ids, or -100 to leave a word out of the loss.")
    return mask_BT & (labels != -100)
