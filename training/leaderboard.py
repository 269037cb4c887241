# SPDX-License-Identifier: Apache-2.0
"""Train and measure the rows of `docs/leaderboard.md`; see `release/leaderboard.py`."""

from release.leaderboard import main

if __name__ == "__main__":
    main()
