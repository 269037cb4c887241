"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.tree_lm.modeling_tree_lm import TreeLMForCausalLM, TreeLMForSequenceClassification, TreeLMModel

__all__ = ["TreeLMForCausalLM", "TreeLMForSequenceClassification", "TreeLMModel"]
