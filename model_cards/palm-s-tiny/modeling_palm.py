"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.palm.modeling_palm import PaLMForCausalLM, PaLMForSequenceClassification, PaLMModel

__all__ = ["PaLMForCausalLM", "PaLMForSequenceClassification", "PaLMModel"]
