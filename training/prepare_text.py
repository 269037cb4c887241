# SPDX-License-Identifier: Apache-2.0
"""Prepare a corpus for training: text -> sentences -> token ids on disk.

    python training/prepare_text.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.prepare_text`.
"""

import sys

from hf_synlm.training.programs.prepare_text import main

if __name__ == "__main__":
    sys.exit(main())
