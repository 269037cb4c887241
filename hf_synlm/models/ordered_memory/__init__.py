"""Ordered Memory (Shen et al., NeurIPS 2019)."""
