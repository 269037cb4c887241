"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.rnng.configuration_rnng import RNNGConfig

__all__ = ["RNNGConfig"]
