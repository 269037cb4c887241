"""Command line of the conversion: `python -m hf_synlm.conversion ARCH --weights FILE --config FILE --output DIR`."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hf_synlm.conversion import CONVERTERS, TOKENIZERS, convert_state_dict, on_lstm, palm, prpn, rnng
from hf_synlm.hub.export import export_model

# What to do with a checkpoint that holds more than tensors.
_PLAIN = "save the plain state dict first."
_REMEDIES = {
    "on_lstm": on_lstm.EXTRACTION,
    "palm": palm.EXTRACTION,
    "prpn": prpn.EXTRACTION,
    "rnng": rnng.EXTRACTION,
}


def read_state_dict(path: Path, remedy: str = _PLAIN) -> dict[str, Tensor]:
    """Read a checkpoint file: safetensors, or a PyTorch file that holds nothing but tensors.

    Args:
        path: the file.
        remedy: what to do with a file that holds other objects, for the message.

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
            f"{path} cannot be read as a file of tensors: {_reason(error)} Files with other pickled objects are "
            f"refused; {remedy}"
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path} holds no state dict (a mapping from names to tensors); {remedy}")
    return dict(loaded)


def _reason(error: Exception) -> str:
    """What the unpickler does not like, without its advice to trust the file."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0]).partition(" Please use")[0]


def read_config(paths: list[Path]) -> dict:
    """Read the authors' configuration: one JSON file, or for GPST one file per section.

    Args:
        paths: one file, or the files of the sections `r2d2_config` and `gpt_config` in this order.

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
        except ValueError as error:  # no UTF-8, or no JSON
            raise ValueError(f"{path} is no JSON file: {error}") from error
        if not isinstance(sections[-1], dict):
            raise ValueError(f"{path} holds no JSON object. Pass the configuration of the checkpoint.")
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
        if options.arch != "gpst" and len(options.config) > 1:
            raise ValueError(f"{len(options.config)} configuration files were given; {options.arch} takes one.")
        config = read_config(options.config)
        tensors = read_state_dict(options.weights, _REMEDIES.get(options.arch, _PLAIN))
        model = convert_state_dict(options.arch, tensors, config)
        tokenizer = TOKENIZERS[options.arch](config) if options.arch in TOKENIZERS else None
        export_model(model, tokenizer, options.output)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    sys.stdout.write(f"saved {options.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
