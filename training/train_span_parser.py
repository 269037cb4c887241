# SPDX-License-Identifier: Apache-2.0
"""Train a constituency parser on treebanks.

    accelerate launch training/train_span_parser.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_span_parser`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_span_parser import main

if __name__ == "__main__":
    main()
