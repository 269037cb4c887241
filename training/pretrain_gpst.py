# SPDX-License-Identifier: Apache-2.0
"""Pretrain GPST on raw text.

    accelerate launch training/pretrain_gpst.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.pretrain_gpst`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.pretrain_gpst import main

if __name__ == "__main__":
    main()
