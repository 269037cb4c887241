"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.gpst.configuration_gpst import GPSTConfig

__all__ = ["GPSTConfig"]
