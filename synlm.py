# SPDX-License-Identifier: Apache-2.0
"""The command `synlm`. Its help, `draw`, and messages about wrong arguments need neither torch nor transformers.

That this module is imported tells hf_synlm to import its models only when a command needs them.
"""

__all__ = ["main"]

from hf_synlm.cli import main
