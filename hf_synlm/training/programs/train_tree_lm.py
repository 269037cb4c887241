"""Train a Tree LM or a Transformer Grammar on a treebank.

    accelerate launch training/train_tree_lm.py --config tree_lm_tiny --output_dir runs/tree_lm

Trees, batches, evaluation and options are those of `train_rnng`: the same sentences in the same order, so that runs can
be compared. Paper: Sartran et al., "Transformer Grammars: Augmenting Transformer Language Models with Syntactic
Inductive Biases at Scale" (TACL 2022).
"""

from dataclasses import dataclass
from functools import partial

from hf_synlm.data.arguments import option
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.programs.train_rnng import RNNGModelArguments, RNNGRecipe


@dataclass
class TreeLMModelArguments(RNNGModelArguments):
    """Tree LM; `--config_overrides structure_attention=stack_compose` makes it a Transformer Grammar."""

    presets = {"tree_lm": "txl-trees"}

    architecture: str = option("tree_lm", "'tree_lm'.")
    backbone: str | None = option(
        None, "Folder or Hub name of a decoder (GPT-2, Llama, Qwen, ...) whose weights and tokenizer to begin with."
    )

    def __post_init__(self):
        """Check that one model is named."""
        super().__post_init__()
        if self.backbone is not None and self.model_name_or_path is not None:
            raise ValueError("backbone and model_name_or_path each name a model to begin with. Leave one of them out.")


class TreeLMRecipe(RNNGRecipe):
    """Train a Tree LM or a Transformer Grammar on gold trees; keep the best validation likelihood."""

    program = "train_tree_lm"
    model_arguments: TreeLMModelArguments


main = partial(run_recipe, TreeLMRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
