"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.pushdown.modeling_pushdown import PushdownForCausalLM, PushdownModel

__all__ = ["PushdownForCausalLM", "PushdownModel"]
