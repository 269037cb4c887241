# SPDX-License-Identifier: Apache-2.0
"""Write a model as a folder that is complete: weights, tokenizer, the code that runs them, and a card.

A folder appears under its name when all of it is written. An interrupted export leaves nothing that loads.
"""

import copy
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.configuration_base import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS, position_limit
from hf_synlm.data.files import check_target, folder_writer, read_json
from hf_synlm.data.tokenizers import check_vocabulary, save_tokenizer
from hf_synlm.hub.card import DEFAULT_FACTS, FACTS_FILE, facts_text, fill_card
from hf_synlm.hub.checkpoint import (
    INDEX_FILE,
    MERGE,
    SPECIAL_IDS,
    StoredTensor,
    check_complete,
    is_adapter,
    stored_tensors,
    weight_checksums,
    weight_files,
)
from hf_synlm.hub.flatten import all_flat_files
from hf_synlm.hub.loading import load_checked_tokenizer
from hf_synlm.hub.upload import check_repo_id

# Names that safetensors has for the types of weights.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: str | os.PathLike,
    card: str | None = None,
    overwrite: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    facts: Mapping[str, Any] | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
    code_repo: str | None = None,
) -> Path:
    """Write a self-contained Hub repository into a folder.

    `save_pretrained` writes weights (safetensors), configuration and code; the tokenizer and the card follow.
    The folder gets its name when all of it is written. In a distributed run, call it on one process, with the gathered
    `state_dict`.

    Args:
        model: a model of this package, or one that was loaded from the Hub with its own code.
        tokenizer: its tokenizer; None leaves the folder without one (a converted checkpoint, say). Its
            `model_max_length` is lowered to the number of the model's positions, if that is limited.
        output_dir: folder to make; its parent folders are made as needed.
        card: text of README.md; by default it is made from the facts.
        overwrite: replace an existing folder. The old one stays until the new one is complete.
        state_dict: weights to save instead of `model.state_dict()`.
        facts: facts on the card, see `fill_card`; `repo_id` is by default the name of the folder. The file card.yaml
            holds them, so that `synlm export` can make the card of a copy.
        stored: types in which the weights are stored, by `stored_tensors` of the model that was loaded; by default that
            of the model. The configuration still names the type in which they are loaded.
        code_repo: repository of the Hub (see `push_code`) from which the folder loads its code, which it does not hold
            then; by default the folder is self-contained.

    Returns:
        The folder.

    Raises:
        ValueError: if the folder exists, if the model would be saved without its code, or if tokenizer and
            model do not fit together, or if `code_repo` lacks a class of the model. Nothing is written then.
    """
    output_dir = Path(output_dir).absolute()
    check_target(output_dir, overwrite)
    _check_code(model)
    if tokenizer is not None:
        check_same_tokens(model.config, tokenizer)
    stated = {"repo_id": output_dir.name, **_example(tokenizer), **(facts or {})}
    config = copy.copy(model.config)
    config.auto_map = _references(config.auto_map, code_repo)
    if getattr(model, "adapts_backbone", False):
        config.adapter_of = model.backbone_source
    text = fill_card(config, stated) if card is None else card

    with folder_writer(output_dir, mark=f".{secrets.token_hex(4)}") as folder:
        own, model.config = model.config, config
        try:
            model.save_pretrained(folder, **({} if state_dict is None else {"state_dict": dict(state_dict)}))
        finally:
            model.config = own
        if stored is not None:
            _store_as(folder, stored)
        if tokenizer is not None:
            positions = position_limit(model.config)
            tokenizer.model_max_length = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
            save_tokenizer(tokenizer, folder)
        (folder / "README.md").write_text(text, encoding="utf-8")
        if card is None:
            if stated.get("results"):
                stated["weights"] = weight_checksums(folder)
            (folder / FACTS_FILE).write_text(facts_text(stated), encoding="utf-8")
        (folder / "requirements.txt").write_text(requirements("peft") if is_adapter(folder) else requirements())
        check_complete(folder)
    return output_dir


def _store_as(folder: Path, wanted: Mapping[str, StoredTensor]) -> None:
    """Rewrite the weights of a folder in other types, of fewer bytes say. Loaded is still what config.json says."""
    here = {name: tensor.dtype for name, tensor in stored_tensors(folder).items()}
    there = {name: tensor.dtype for name, tensor in wanted.items() if name in here and tensor.dtype in _FLOATS}
    other, size = {name for name, dtype in there.items() if dtype != here[name]}, 0
    for file in weight_files(folder) if other else ():
        tensors = load(file.read_bytes())  # not `load_file`, which leaves them in the file that is replaced
        tensors |= {name: tensors[name].to(_FLOATS[there[name]]) for name in tensors.keys() & other}
        save_file(tensors, file, {"format": "pt"})
        size += sum(tensor.nbytes for tensor in tensors.values())
    if other and (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE)
        index["metadata"]["total_size"] = size
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def requirements(*more: str) -> str:
    """The packages that the code of an exported folder needs, for its requirements.txt, in tested versions."""
    major, minor = NEWEST_TRANSFORMERS.split(".")
    tested = f">={OLDEST_TRANSFORMERS},<{major}.{int(minor) + 1}"
    return "\n".join(["torch", f"transformers{tested}", *more, ""])


def _references(auto_map: Mapping[str, str], code_repo: str | None) -> dict[str, str]:
    """An `auto_map` whose code lies in the folder itself, or in a repository of the Hub."""
    plain = {auto_class: reference.rpartition("--")[2] for auto_class, reference in auto_map.items()}
    if code_repo is None:
        return plain
    check_repo_id(code_repo)
    own = sorted({f"{reference.partition('.')[0]}.py" for reference in plain.values()} - all_flat_files().keys())
    if own:
        raise ValueError(f"{own} is your own code, but {code_repo!r} holds only code of hf_synlm. Leave out code_repo.")
    return {auto_class: f"{code_repo}--{reference}" for auto_class, reference in plain.items()}


def _example(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """The fact `example`: a text whose words the tokenizer knows, if one of two is."""
    for text in (DEFAULT_FACTS["example"], "the people of this country agree"):
        if (
            tokenizer is None
            or tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text
        ):
            return {"example": text}
    return {}


def _check_code(model: Any) -> None:
    if not getattr(getattr(model, "config", None), "auto_map", None):
        raise ValueError(
            f"The configuration of {type(model).__name__} has no auto_map, so the code would not be saved. If it is "
            "an n-gram model, copy its folder, which loads only with hf_synlm. Unwrap other models of hf_synlm "
            "(accelerator.unwrap_model)."
        )
    if getattr(model, "_hf_peft_config_loaded", False) and not getattr(model, "adapts_backbone", False):
        raise ValueError(f"{type(model).__name__} holds an adapter of PEFT. {MERGE}")


def check_tokenizer_of(folder: str | os.PathLike) -> None:
    """Check that there is a tokenizer in a folder, and that it fits the configuration.

    Args:
        folder: a model folder.

    Raises:
        ValueError: if it is missing, or has more tokens or other special tokens.
    """
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise ValueError(
            f"{os.fspath(folder)!r} has no tokenizer, so it cannot read text. Convert or export it with a tokenizer."
        )
    check_same_tokens(AutoConfig.from_pretrained(folder), load_checked_tokenizer(os.fspath(folder)))


def check_same_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the tokenizer has more tokens than the model, or other special tokens."""
    remedy = "Call model.resize_token_embeddings, or pass the tokenizer that the model was trained with."
    check_vocabulary(tokenizer, config.vocab_size, remedy)
    for name in SPECIAL_IDS:
        of_model, of_tokenizer = getattr(config, name, None), getattr(tokenizer, name, None)
        if of_model is not None and of_tokenizer is not None and of_model != of_tokenizer:
            raise ValueError(
                f"{name} is {of_model} in the model's configuration and {of_tokenizer} in the tokenizer. Give both "
                "the same value."
            )
