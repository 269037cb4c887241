# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_synlm.cli` is `synlm`."""

import sys

from hf_synlm.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
