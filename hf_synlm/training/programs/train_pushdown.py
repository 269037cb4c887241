# SPDX-License-Identifier: Apache-2.0
"""Train Pushdown Layers on a treebank.

    accelerate launch training/train_pushdown.py --config pushdown_tiny --output-dir runs/pushdown

Trees, batches, evaluation and options are those of `train_rnng`: the same sentences in the same order, so that runs can
be compared. The trees are binarized to the right. Paper: Murty et al., "Pushdown Layers: Encoding Recursive Structure
in Transformer Language Models" (EMNLP 2023).
"""

from functools import partial

from hf_synlm.training.arguments.base import refuse
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.tasks.treebank_recipe import GrammarRecipe


class PushdownRecipe(GrammarRecipe):
    """Train Pushdown Layers on gold trees by teacher forcing; keep the best validation likelihood."""

    program = "train_pushdown"
    special_tokens = ("eos_token",)

    def check(self) -> None:
        """Refuse beams of actions, too."""
        super().check()
        reason = "a beam of RNNG; Pushdown Layers have only num_beams"
        refuse(self.evaluation, "action_beam_size fast_track_size", reason)


main = partial(run_recipe, PushdownRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
