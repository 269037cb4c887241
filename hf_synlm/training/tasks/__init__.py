# SPDX-License-Identifier: Apache-2.0
"""Data, objectives and evaluation of the programs."""
