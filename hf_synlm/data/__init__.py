"""Reading text and treebanks, tokenizers, and batches for training."""
