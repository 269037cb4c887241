"""Pushdown Layers (Murty et al., EMNLP 2023)."""
