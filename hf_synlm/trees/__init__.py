# SPDX-License-Identifier: Apache-2.0
"""Trees without tensors: spans, binary trees, actions of a transition system, given trees."""
