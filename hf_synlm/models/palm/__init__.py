# SPDX-License-Identifier: Apache-2.0
"""PaLM, a language model with attention over spans (Peng et al., EMNLP 2019)."""
