# SPDX-License-Identifier: Apache-2.0
"""The methods of a model with labeled trees: `forward`, `parse`, `generate`, and the classifier."""
