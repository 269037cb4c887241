# SPDX-License-Identifier: Apache-2.0
"""What all models share: base of the configurations, outputs, losses, batches of tokens, tools for modules."""
