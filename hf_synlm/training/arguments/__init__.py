# SPDX-License-Identifier: Apache-2.0
"""Options of the programs, which need neither torch nor a model."""
