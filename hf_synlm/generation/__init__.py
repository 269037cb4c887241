# SPDX-License-Identifier: Apache-2.0
"""`generate` of models that search: the mixin and its decoding loops."""
