"""Running `synlm` in the process of the tests."""

import re
from typing import Any

from hf_synlm.cli import main


def run(capsys: Any, *arguments: object, status: int = 0) -> str:
    """Standard output of a command that ends with this exit code."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == status, captured.err
    return captured.out


def remarks(capsys: Any, *arguments: object) -> str:
    """What a command that ends well says on standard error."""
    code, error = main([str(argument) for argument in arguments]), capsys.readouterr().err
    assert code == 0, error
    return error


def fail(capsys: Any, *arguments: object) -> str:
    """The message of a command that refuses its input, without the lines of usage above it."""
    code = main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error, error
    _, *messages = re.split("^Error: ", error, flags=re.M)
    assert len(messages) == 1, error
    return " ".join(messages[0].split())
