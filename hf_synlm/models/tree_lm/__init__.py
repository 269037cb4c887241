"""Tree LM and Transformer Grammars (Sartran et al., TACL 2022)."""
