# SPDX-License-Identifier: Apache-2.0
"""Expecting that a call refuses what it is given."""

from collections.abc import Callable
from typing import Any

import pytest


def raised(error: Any, message: str | None, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """The call raises the error, whose message has the words (a regular expression; None = any)."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)


def refused(message: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """The call raises a ValueError whose message has the words."""
    raised(ValueError, message, call, *arguments, **options)
