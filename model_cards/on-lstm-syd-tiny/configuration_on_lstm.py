"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.on_lstm.configuration_on_lstm import ONLSTMConfig

__all__ = ["ONLSTMConfig"]
