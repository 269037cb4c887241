# SPDX-License-Identifier: Apache-2.0
"""The programs that `synlm train` and `training/*.py` start."""
