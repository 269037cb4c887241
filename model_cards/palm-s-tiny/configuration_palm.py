"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.palm.configuration_palm import PaLMConfig

__all__ = ["PaLMConfig"]
