"""The programs that `synlm train` and `training/*.py` start."""
