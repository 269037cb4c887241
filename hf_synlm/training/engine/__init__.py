# SPDX-License-Identifier: Apache-2.0
"""From a command line to a saved model: arguments, loop, checkpoints, export."""
