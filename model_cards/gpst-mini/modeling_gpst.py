"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.gpst.modeling_gpst import GPSTForCausalLM, GPSTForSequenceClassification, GPSTModel

__all__ = ["GPSTForCausalLM", "GPSTForSequenceClassification", "GPSTModel"]
