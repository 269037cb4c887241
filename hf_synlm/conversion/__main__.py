"""Command line of the conversion: `python -m hf_synlm.conversion gpst --weights FILE --config FILE --output DIR`."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hf_synlm.conversion import CONVERTERS, convert_state_dict
from hf_synlm.hub.export import export_model


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a checkpoint file: safetensors, or a PyTorch file that holds nothing but tensors.

    Args:
        path: the file.

    Returns:
        Tensors by name.

    Raises:
        ValueError: when the file is missing, no checkpoint, or a pickle with objects other than tensors (loading those
            could run foreign code).
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is no checkpoint can fail anywhere in the unpickler
        raise ValueError(
            f"{path} cannot be read as a file of tensors: {error}. Files with other pickled objects are refused; "
            "save the plain state dict first."
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path} holds no state dict (a mapping from names to tensors).")
    return dict(loaded)


def read_config(paths: list[Path]) -> dict:
    """Read the authors' configuration: one JSON file with all sections, or one file per section.

    Args:
        paths: one file that holds `r2d2_config` and `gpt_config`, or the two files themselves in this order.

    Returns:
        The configuration with its sections.

    Raises:
        ValueError: when a file is missing or no JSON object.
    """
    sections = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"There is no file {path}.")
        try:
            sections.append(json.loads(path.read_text(encoding="utf-8")))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON file: {error}") from error
    if len(sections) == 1:
        return sections[0]
    if len(sections) == 2:
        return {"r2d2_config": sections[0], "gpt_config": sections[1]}
    raise ValueError(f"{len(paths)} configuration files were given; pass one with both sections, or two.")


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
    parser.add_argument("--output", type=Path, required=True, help="folder to write; it must not exist")
    options = parser.parse_args(arguments)
    try:
        if options.output.exists():
            raise ValueError(f"The output folder {options.output} exists. Choose another one or remove it.")
        config = read_config(options.config)
        model = convert_state_dict(options.arch, read_state_dict(options.weights), config)
        export_model(model, None, options.output)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    sys.stdout.write(f"saved {options.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
