# SPDX-License-Identifier: Apache-2.0
"""The search for labeled trees, which RNNG and Tree LM share: the machine, fast-track, best-first, the decoder."""
