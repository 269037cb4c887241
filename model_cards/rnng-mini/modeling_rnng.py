"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.rnng.modeling_rnng import RNNGForCausalLM, RNNGForSequenceClassification, RNNGModel

__all__ = ["RNNGForCausalLM", "RNNGForSequenceClassification", "RNNGModel"]
