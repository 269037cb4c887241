"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.pushdown.configuration_pushdown import PushdownConfig

__all__ = ["PushdownConfig"]
