# SPDX-License-Identifier: Apache-2.0
"""Measure the speed of training, search and evaluation; see `benchmarks/`.

python training/benchmark.py --list
python training/benchmark.py --case gpst-train-quarter --runs 7 --json
"""

import sys

from benchmarks.cases import main

if __name__ == "__main__":
    sys.exit(main())
