"""URNNG, unsupervised recurrent neural network grammars (Kim et al., NAACL 2019)."""
