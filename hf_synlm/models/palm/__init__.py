"""PaLM, a language model with attention over spans (Peng et al., EMNLP 2019)."""
