"""`generate` of models that search: the mixin and its decoding loops."""
