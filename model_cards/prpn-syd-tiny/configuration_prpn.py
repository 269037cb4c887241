"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.prpn.configuration_prpn import PRPNConfig

__all__ = ["PRPNConfig"]
