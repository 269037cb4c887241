# SPDX-License-Identifier: Apache-2.0
"""Train, measure and publish the checkpoints of `model_cards/`; see `release/make_checkpoints.py`."""

from release.make_checkpoints import main

if __name__ == "__main__":
    main()
