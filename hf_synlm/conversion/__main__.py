"""Command line of the conversion: `python -m hf_synlm.conversion ARCH --weights FILE --config FILE --output DIR`."""

import argparse
import sys
from pathlib import Path

from hf_synlm.conversion import CONVERTERS
from hf_synlm.conversion.files import convert_files


def main(arguments: list[str] | None = None) -> int:
    """Convert one checkpoint and save it as a repository that loads with the Auto classes.

    Args:
        arguments: command line; default `sys.argv`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m hf_synlm.conversion", description=__doc__)
    parser.add_argument("arch", choices=sorted(CONVERTERS))
    parser.add_argument("--weights", type=Path, required=True, help="the authors' checkpoint file")
    parser.add_argument("--config", type=Path, nargs="+", required=True, help="the authors' configuration file(s)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    options = parser.parse_args(arguments)
    try:
        convert_files(options.arch, options.weights, options.config, options.output, overwrite=options.overwrite)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    sys.stdout.write(f"saved {options.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
