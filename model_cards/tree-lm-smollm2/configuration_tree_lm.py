"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.tree_lm.configuration_tree_lm import TreeLMConfig

__all__ = ["TreeLMConfig"]
