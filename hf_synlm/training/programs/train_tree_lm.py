"""Train a Tree LM or a Transformer Grammar on a treebank.

    accelerate launch training/train_tree_lm.py --config tree_lm_tiny --output_dir runs/tree_lm

Trees, batches, evaluation and options are those of `train_rnng`: the same sentences in the same order, so that runs can
be compared. Paper: Sartran et al., "Transformer Grammars: Augmenting Transformer Language Models with Syntactic
Inductive Biases at Scale" (TACL 2022).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from hf_synlm.data.arguments import option
from hf_synlm.models.tree_lm.adapter import linear_layers
from hf_synlm.training.engine.arguments import check_minimum
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.run import Run
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.programs.train_rnng import RNNGModelArguments, RNNGRecipe

LORA_OPTIONS = "lora_alpha lora_dropout lora_target_modules label_learning_rate bias_learning_rate".split()
# Where LoRA begins: a label has to win against all words, whose biases are 0.
LABEL_BIAS = 4.0


@dataclass
class TreeLMModelArguments(RNNGModelArguments):
    """Tree LM; `--config_overrides structure_attention=stack_compose` makes it a Transformer Grammar."""

    presets = {"tree_lm": "txl-trees"}

    architecture: str = option("tree_lm", "'tree_lm'.")
    backbone: str | None = option(
        None,
        "Folder or Hub name of a decoder (GPT-2, Llama, Qwen, ...) whose weights and tokenizer to begin with. With "
        "--model_name_or_path: the backbone of that adapter.",
    )
    backbone_name: str | None = option(
        None, "Hub name of the backbone if --backbone is a folder, from which an adapter is loaded elsewhere."
    )
    lora_r: int | None = option(
        None,
        "Train LoRA of this rank instead of all weights of the backbone; the table of the labels and the biases of the "
        "heads are trained in full. The model that is saved is an adapter of the backbone.",
    )
    lora_alpha: int | None = option(None, "Scale of LoRA; default: twice the rank.")
    lora_dropout: float = option(0.0, "Dropout of LoRA.")
    lora_target_modules: list[str] | None = option(
        None, "Layers of the backbone that get LoRA, such as q_proj v_proj; default: all that are linear."
    )
    label_learning_rate: float | None = option(
        None, "With LoRA, learning rate of the table of the labels; default: 8 times --learning_rate."
    )
    bias_learning_rate: float | None = option(
        None, "With LoRA, learning rate of the biases of the heads; default: 40 times --learning_rate."
    )

    def __post_init__(self):
        """Check that options of LoRA stand beside a rank and a backbone."""
        super().__post_init__()
        check_minimum(self, 1, "lora_r")
        check_minimum(self, 0, "lora_alpha label_learning_rate bias_learning_rate")
        if self.backbone is None and (self.lora_r or self.backbone_name):
            raise ValueError("lora_r and backbone_name belong to a backbone. Pass --backbone, or leave them out.")
        for name in LORA_OPTIONS:
            if self.lora_r is None and getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r} without lora_r. Pass --lora_r, or leave it out.")


class TreeLMRecipe(RNNGRecipe):
    """Train a Tree LM or a Transformer Grammar on gold trees; keep the best validation likelihood."""

    program = "train_tree_lm"
    model_arguments: TreeLMModelArguments

    def load(self) -> PreTrainedModel:
        """Read and encode the trees, make or load tokenizer and model, and add LoRA if it is asked for."""
        model = super().load()
        if self.model_arguments.lora_r is not None:
            self._add_lora(model, self.model_arguments.lora_r)
        return model

    def _add_lora(self, model: Any, rank: int) -> None:
        """Add LoRA to the backbone, and let labels begin with a bias of their own."""
        given = self.model_arguments
        model.name_or_path = given.backbone_name or model.name_or_path
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=given.lora_alpha or 2 * rank,
            lora_dropout=given.lora_dropout,
            target_modules=linear_layers(model, given.lora_target_modules),
        )
        model.add_adapter(config)
        with torch.no_grad():
            model.label_head.bias.fill_(LABEL_BIAS)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.accelerator.print(f"LoRA of rank {rank}: {trained:,} parameters are trained")

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """With LoRA, the table of the labels and the biases of the heads have their own."""
        given, rate = self.model_arguments, self.arguments.learning_rate
        if given.lora_r is None:
            return {}
        labels, biases = given.label_learning_rate, given.bias_learning_rate
        labels, biases = 8 * rate if labels is None else labels, 40 * rate if biases is None else biases
        return {"embed_labels": labels, "lm_head": biases, "label_head": biases}

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Those of every tree program, and LoRA's."""
        names = ("lora_r", *LORA_OPTIONS)
        lora = {name: getattr(self.model_arguments, name) for name in names if self.model_arguments.lora_r is not None}
        return {**super().settings(model), **lora}

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and sentences, and the backbone."""
        given = self.model_arguments
        return {
            **super().card_facts(run),
            **hub_facts(given.backbone_name or given.backbone or given.model_name_or_path),
        }


main = partial(run_recipe, TreeLMRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
