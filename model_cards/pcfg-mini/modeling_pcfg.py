"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.pcfg.modeling_pcfg import PCFGForCausalLM, PCFGModel

__all__ = ["PCFGForCausalLM", "PCFGModel"]
