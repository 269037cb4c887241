"""GPST, Generative Pretrained Structured Transformers (Hu et al., ACL 2024)."""
