"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig

__all__ = ["PCFGConfig"]
