# SPDX-License-Identifier: Apache-2.0
"""Reading times: how much better a regression predicts them when surprisal is added. Needs the extra `[reading]`."""

try:
    # Modules of this package import them by parts; here only their absence is told.
    import scipy  # noqa: F401
    import statsmodels  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error.name} is missing: regressions need pip install '.[reading]'") from error
