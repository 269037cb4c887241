# SPDX-License-Identifier: Apache-2.0
"""GPST, Generative Pretrained Structured Transformers (Hu et al., ACL 2024)."""
