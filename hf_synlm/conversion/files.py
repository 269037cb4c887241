# SPDX-License-Identifier: Apache-2.0
"""Files of the authors' checkpoints: reading them without running what is in them, and converting them to a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_synlm.conversion import TOKENIZERS, convert_state_dict, on_lstm, palm, pcfg, prpn, pushdown, rnng
from hf_synlm.data.files import check_target, read_json
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
    """Read a checkpoint file: safetensors, or a PyTorch file that holds nothing but tensors and plain values.

    Others are refused (loading them could run foreign code); `remedy` ends the message. The state of a training is
    reduced to its `state_dict` or `model_state_dict`.
    """
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is not a checkpoint can fail anywhere in the unpickler
        raise ValueError(
            f"{path} cannot be read as a file of tensors: {_reason(error)} Files with pickled objects other than "
            f"tensors are refused; {remedy}"
        ) from error
    if isinstance(loaded, Mapping):
        loaded = loaded.get("state_dict", loaded.get("model_state_dict", loaded))
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path} is not a state dict (a mapping from names to tensors); {remedy}")
    return dict(loaded)


def _reason(error: Exception) -> str:
    """What the unpickler does not like, without its advice to trust the file."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0]).partition(" Please use")[0]


def read_config(paths: Sequence[Path]) -> dict:
    """Read the authors' configuration: a JSON file, or for GPST `r2d2_config` and `gpt_config` in this order."""
    if not paths:
        raise ValueError("A file of tensors has no configuration. Pass the authors' configuration by --config.")
    sections = [read_json(path) for path in paths]
    if len(sections) == 1:
        return sections[0]
    if len(sections) == 2:
        return {"r2d2_config": sections[0], "gpt_config": sections[1]}
    raise ValueError(f"{len(paths)} configuration files were given. Pass one file with both sections, or two files.")


def convert_files(
    arch: str,
    weights: Path,
    configs: Sequence[Path],
    output_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    vocabulary: Path | None = None,
) -> Path:
    """Convert one checkpoint and save it as a repository that loads with the Auto classes.

    Without a `tokenizer`, the one that the configuration describes is saved, if it describes one. `vocabulary` is the
    vocab.pkl of Pushdown-Layers: GPT-2's `tokenizer` is then restricted to it, and without `configs` the checkpoint
    counts as the authors' BLLIP model. Nothing is written if a file is missing or of another kind, or if a tensor or a
    value is not accounted for.
    """
    check_target(output_dir, overwrite, [path for path in (weights, *configs, vocabulary) if path is not None])
    if arch != "gpst" and len(configs) > 1:
        raise ValueError(f"{len(configs)} configuration files were given, but {arch} takes one.")
    state, config = _read_checkpoint(arch, weights, configs, vocabulary is not None)
    if vocabulary is not None:
        if arch != "pushdown" or tokenizer is None:
            raise ValueError("--vocabulary needs pushdown and --tokenizer gpt2. Pass these, or omit --vocabulary.")
        pieces = pushdown.read_vocabulary(vocabulary)
        tokenizer = pushdown.pushdown_tokenizer(pieces, tokenizer)
        config = {"vocab_size": len(pieces) + 2, "end_word_id": pieces.index(pushdown.END_WORD), **config}
    model = convert_state_dict(arch, state, config)
    if tokenizer is None and arch in TOKENIZERS:
        tokenizer = TOKENIZERS[arch](config)
    return export_model(model, tokenizer, output_dir, overwrite=overwrite)


def _read_checkpoint(
    arch: str, weights: Path, configs: Sequence[Path], is_bllip: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration; without `configs` those of a pickled PCFG, or of the authors' BLLIP model."""
    pickled = pcfg.read_pickled_model(weights) if arch == "pcfg" and weights.suffix != ".safetensors" else None
    if pickled is not None:
        return pickled[0], {**pickled[1], **(read_config(configs) if configs else {})}
    state = read_state_dict(weights, _REMEDIES.get(arch, _PLAIN))
    return state, read_config(configs) if configs or not is_bllip else dict(pushdown.BLLIP_CONFIG)
