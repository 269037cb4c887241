"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.prpn.modeling_prpn import PRPNForCausalLM, PRPNForSequenceClassification, PRPNModel

__all__ = ["PRPNForCausalLM", "PRPNForSequenceClassification", "PRPNModel"]
