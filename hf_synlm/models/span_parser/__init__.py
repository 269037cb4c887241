# SPDX-License-Identifier: Apache-2.0
"""A constituency parser: an encoder of transformers, scores of spans, and the best tree by dynamic programming."""
