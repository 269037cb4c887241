"""Trees without tensors: spans, binary trees, actions of a transition system, given trees."""
