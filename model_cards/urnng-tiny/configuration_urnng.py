"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.urnng.configuration_urnng import URNNGConfig

__all__ = ["URNNGConfig"]
