# SPDX-License-Identifier: Apache-2.0
"""Reading text and treebanks, tokenizers, and batches for training."""
