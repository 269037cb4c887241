# SPDX-License-Identifier: Apache-2.0
"""Train a Tree LM or a Transformer Grammar on a treebank.

    accelerate launch training/train_tree_lm.py --config tree_lm_tiny --output-dir runs/tree_lm

Trees, batches, evaluation and options are those of `train_rnng`: the same sentences in the same order, so that runs can
be compared. Paper: Sartran et al., "Transformer Grammars: Augmenting Transformer Language Models with Syntactic
Inductive Biases at Scale" (TACL 2022).
"""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_synlm.data.text import NATURAL
from hf_synlm.data.tokenizers import begin_token_id
from hf_synlm.training.arguments.base import check_overrides
from hf_synlm.training.arguments.treebank import LORA_OPTIONS, TreeLMModelArguments
from hf_synlm.training.engine.run import add_lora, new_or_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.tasks.treebank_recipe import GrammarRecipe

# Where LoRA begins: a label has to win against all words, whose biases are 0.
LABEL_BIAS = 4.0
# Learning rates with LoRA beside that of its own weights: of the table of the labels, and of their biases.
LABEL_RATE, BIAS_RATE = 8, 40


class TreeLMRecipe(GrammarRecipe):
    """Train a Tree LM or a Transformer Grammar on gold trees; keep the best validation likelihood."""

    program = "train_tree_lm"
    model_arguments: TreeLMModelArguments
    adapter_of: str | None = None  # Hub name of the backbone of an adapter

    def check(self) -> None:
        """Complete what depends on the arguments: the tokenizer of a backbone, and the labels of bottom-up trees."""
        super().check()
        given: Any = self.model_arguments
        self.backbone, fields = given.backbone, given.config_overrides or {}
        self.label_system = fields.get("linearization", "top_down")
        if self.backbone is not None:
            self.special_tokens = ("eos_token",)  # some decoders have no padding

    def make_model(self, labels: list[str]) -> PreTrainedModel:
        """Make an untrained model, or begin with the weights of a backbone or of a Tree LM."""
        given, tokenizer = self.model_arguments, self.tokenizer
        if given.model_name_or_path is not None:
            return new_or_pretrained(given, tokenizer, {}, backbone=self.backbone, merge=given.lora_r is None)
        if self.backbone is None:
            return super().make_model(labels)
        model_class, decided = given.row.model_class, ("backbone_config", "nonterminals", "vocab_size")
        overrides = check_overrides(model_class.config_class, given.config_overrides, decided)
        ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": begin_token_id(tokenizer)}
        model = model_class.from_backbone(self.backbone, labels, **{"text_style": NATURAL, **ids, **overrides})
        # Clients that read the tokenizer begin texts with the same token.
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(model.config.bos_token_id)
        return model

    def load(self) -> PreTrainedModel:
        """Read and encode the trees, make or load tokenizer and model, and add LoRA if it is asked for."""
        model: Any = super().load()
        rank, name = self.model_arguments.lora_r, self.model_arguments.model_name_or_path
        if rank is None:
            return model
        if name is None:
            self._add_lora(model, rank)
        elif rank != (own := next((lora.r for lora in getattr(model, "peft_config", {}).values()), None)):
            no_lora = "no LoRA. Leave --lora-r out, also of the file of --config"
            found = f"LoRA of rank {own}. Pass --lora-r {own}" if own else no_lora
            raise ValueError(f"--lora-r is {rank}, but {name!r} has {found}.")
        elif self.model_arguments.backbone_name is not None:
            model.backbone_source["name"] = self.model_arguments.backbone_name
        self.adapter_of = model.backbone_source["name"]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.accelerator.print(f"LoRA of rank {rank}: {trained:,} parameters are trained")
        return model

    def _add_lora(self, model: Any, rank: int) -> None:
        """Add LoRA to the backbone, and let labels begin with a bias of their own."""
        given = self.model_arguments
        alpha = {} if given.lora_alpha is None else {"lora_alpha": given.lora_alpha}
        add_lora(model, rank, given.backbone_name, given.lora_target_modules, task_type="CAUSAL_LM", **alpha)
        with torch.no_grad():
            model.label_head.bias.fill_(LABEL_BIAS)

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """With LoRA, the table of the labels and their biases have their own."""
        rate = self.arguments.learning_rate
        if self.model_arguments.lora_r is None:
            return {}
        own_head = {} if model.config.tie_word_embeddings else {"label_head.weight": LABEL_RATE * rate}
        return {"embed_labels": LABEL_RATE * rate, **own_head, "label_head.bias": BIAS_RATE * rate}

    def settings(self, model: Any) -> dict[str, Any]:
        """Those of every tree program, and LoRA's and its backbone."""
        found = super().settings(model)
        if self.model_arguments.lora_r is not None:
            found |= {name: getattr(self.model_arguments, name) for name in ("lora_r", *LORA_OPTIONS.split())}
            found["backbone"] = model.backbone_source["sha256"]
        return found

    def base_model(self) -> str | None:
        """The backbone, or the Tree LM that the run continues."""
        given = self.model_arguments
        return given.backbone_name or self.adapter_of or given.backbone or given.model_name_or_path


main = partial(run_recipe, TreeLMRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
