"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.urnng.modeling_urnng import URNNGForCausalLM, URNNGModel

__all__ = ["URNNGForCausalLM", "URNNGModel"]
