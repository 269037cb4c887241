# SPDX-License-Identifier: Apache-2.0
"""Word-synchronous beam search over words and trees: states, stacks, scores of words, parsing."""
