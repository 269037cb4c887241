"""Benchmarks: SyntaxGym, BLiMP, GLUE, ROUGE, the lm-eval model."""
