# SPDX-License-Identifier: Apache-2.0
"""Measuring what the models learned."""
