# SPDX-License-Identifier: Apache-2.0
"""Train RNNG on a treebank, or an LSTM or GPT-2 language model on the words of the same treebank.

    accelerate launch training/train_rnng.py --config rnng_tiny --output-dir runs/rnng_tiny

Trees come from files of bracketed trees, or (default) from the embedded treebank. Gold derivations are learned by
teacher forcing. All architectures read the same tokens in the same batches. The sentences of a batch have similar
numbers of actions, and the number of padded actions in a batch is limited. The model that is kept is the one with the
best validation likelihood. Paper: Noji and Oseki, "Effective Batching for Recurrent Neural Network Grammars" (Findings
of ACL 2021).
"""

from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from hf_synlm.training.engine.run import make_baseline
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.tasks.tree_batches import TreeCollator, WordCollator
from hf_synlm.training.tasks.treebank_recipe import GrammarRecipe
from hf_synlm.trees.codecs import LabeledCodec


class RNNGRecipe(GrammarRecipe):
    """Train RNNG on gold trees by teacher forcing, or a baseline on their words; the best validation loss wins."""

    program = "train_rnng"

    def make_model(self, labels: list[str]) -> PreTrainedModel:
        """An RNNG, an LSTM, or a GPT-2 with positions for the longest sentence."""
        given = self.model_arguments
        if given.row.model is None:
            longest = self.data.max_sentence_tokens
            return make_baseline(given.architecture, given.config_overrides, self.tokenizer, longest)
        return super().make_model(labels)

    def collator(self, source: LabeledCodec) -> TreeCollator | WordCollator:
        """Batches with the plan of their derivations, or of words alone."""
        if self.is_grammar:
            return replace(super().collator(source), config=self.config)
        # A GPT-2 does not put the begin token before its input, as our models do.
        begin = self.config.bos_token_id if self.model_arguments.row.model is None else None
        return WordCollator(self.tokenizer.pad_token_id, begin)


main = partial(run_recipe, RNNGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
