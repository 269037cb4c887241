# SPDX-License-Identifier: Apache-2.0
"""Parsing F1 by convention, EVALB, tables of errors, baseline trees."""
