"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.on_lstm.modeling_on_lstm import ONLSTMForCausalLM, ONLSTMForSequenceClassification, ONLSTMModel

__all__ = ["ONLSTMForCausalLM", "ONLSTMForSequenceClassification", "ONLSTMModel"]
