# SPDX-License-Identifier: Apache-2.0
"""Adapters: LoRA on a backbone of the Hub, and folders that hold what was trained without the backbone's weights.

`add_adapter` freezes the backbone but for the adapters of its layers; all other weights are trained in full. A folder
of such a model has configuration, tokenizer and code like any other, but no weights of the backbone, which `adapter_of`
of its configuration names. Its folder `adapter` has the format of PEFT. `from_pretrained` adds the adapter to the
backbone, W + s B A: the model that it returns is an ordinary one, which costs what plain weights cost.
"""

import copy
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear
from transformers import GenerationConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from hf_synlm.core.module_tools import SyntacticPreTrainedModel

try:  # for adapters only
    import peft
except ImportError:
    peft = None

ADAPTER_FOLDER = "adapter"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token", "subfolder")
_PEFT_PREFIX = "base_model.model."


class AdapterLoading(SyntacticPreTrainedModel):
    """Lets `from_pretrained` read the folders of adapters, too."""

    @classmethod
    def adapted_class(cls) -> Any:
        """The class that an adapter was saved from, if this one is not it."""
        return cls

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        backbone: str | None = None,
        merge: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load a model, or the adapter of a backbone, which is added to its weights.

        Args:
            pretrained_model_name_or_path: folder or Hub name.
            *args: as in transformers.
            backbone: folder or Hub name of the backbone of an adapter; default: the one that the adapter names.
            merge: add the adapter to the weights. Without, LoRA stays beside them, to be trained on, and
                `save_pretrained` writes an adapter again.
            **kwargs: as in transformers.

        Returns:
            An ordinary model: `save_pretrained` writes all weights. (Not with merge=False.)

        Raises:
            ValueError: the backbone is missing or does not fit, or `backbone` is given for a folder that holds all
                weights.
        """
        name, given = pretrained_model_name_or_path, dict(kwargs)
        hub = {key: given[key] for key in HUB_OPTIONS if given.get(key) is not None}
        config, dtype = given.pop("config", None), given.pop("dtype", "auto")
        if not isinstance(config, PreTrainedConfig) and (config or name) is not None:
            options = {"return_unused_kwargs": True, **given}
            config, given = cls.config_class.from_pretrained(config or name, **options)
        if name is None or config.adapter_of is None:
            return super().from_pretrained(name, *args, **kwargs)
        given = {key: value for key, value in given.items() if key not in HUB_OPTIONS}
        more = {"backbone": backbone, "merge": merge, "dtype": dtype, **given}
        return _load_with_adapter(cls, name, config, hub, *args, **more)


class AdapterMixin(AdapterLoading):
    """Adds LoRA to the backbone of a model, and saves what is trained."""

    # Name and fingerprint of the backbone, for models whose weights are still its own but for an adapter.
    backbone_source: dict[str, Any] | None = None
    adapts_backbone = False
    _hf_peft_config_loaded = False  # of transformers, which has it only where PEFT is
    backbone_prefix = ""  # how the names of the backbone's layers begin
    frozen: tuple[str, ...] = ()  # parameters beside the backbone that an adapter keeps as they are

    def is_of_backbone(self, name: str) -> bool:
        """Whether a parameter came from the backbone."""
        return name.startswith(self.backbone_prefix)

    def load_backbone(self, name: str, **access: Any) -> None:
        """Take over the weights of the backbone of this folder or Hub name."""
        raise NotImplementedError  # a hook: every model with a backbone has its own

    def fingerprint(self) -> str:
        """Hash of the weights that an adapter leaves out: the first numbers of each, as bfloat16."""
        digest = hashlib.sha256()
        weights = self.state_dict()
        for name in sorted(filter(self.is_of_backbone, weights)):
            start = weights[name].flatten()[:8].to("cpu", torch.bfloat16)
            digest.update(start.float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def saved_in_full(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of an adapter besides LoRA: all outside the backbone."""
        return {name: value for name, value in weights.items() if not self.is_of_backbone(name)}

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add LoRA to the backbone; all other weights are trained in full.

        On other weights than those of the backbone, this is `add_adapter` of transformers. Its version 5.24 asks for a
        PEFT that is not released: take `get_peft_model`.

        Args:
            adapter_config: `LoraConfig` of PEFT; its `target_modules` are layers of the backbone, see `linear_layers`.
            adapter_name: default: "default".

        Raises:
            ValueError: the model has an adapter already, or the adapter reaches beyond the backbone.
        """
        source = self.backbone_source
        if source is None or (not self._hf_peft_config_loaded and self.fingerprint() != source["sha256"]):
            super().add_adapter(adapter_config, adapter_name)
            return
        if self._hf_peft_config_loaded:
            raise ValueError("The model already has an adapter. First save the model, and load it by from_pretrained.")
        # As in transformers, but with any PEFT.
        self._hf_peft_config_loaded = True
        peft.inject_adapter_in_model(adapter_config, self, adapter_name or "default")
        adapter_config.base_model_name_or_path = source["name"]
        full = self.saved_in_full(dict(self.named_parameters()))
        beyond = [name for name in full if {"base_layer", "original_module", "modules_to_save"} & set(name.split("."))]
        if beyond:
            raise ValueError(
                f"The adapter changes {beyond[0]}, but an adapter may change only the backbone. Make the model "
                "again, with target_modules from linear_layers(model) and without modules_to_save."
            )
        for name, parameter in full.items():
            parameter.requires_grad_(name not in self.frozen)
        self.adapts_backbone = True

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model, or, after `add_adapter`, what is trained, without the backbone.

        Args:
            save_directory: the folder.
            *args: as in transformers.
            **kwargs: as in transformers; an adapter is pushed by `push_to_hub` of the model only.

        Raises:
            ValueError: an adapter, and `push_to_hub` is set.
        """
        if not self.adapts_backbone:
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        if kwargs.get("push_to_hub"):
            raise ValueError("Save without push_to_hub=True, because this is an adapter. Then call model.push_to_hub.")
        if not kwargs.get("is_main_process", True):
            return
        weights = dict(kwargs.get("state_dict") or self.state_dict())
        (adapter,) = self.peft_config
        # Without `save_embedding_layers`, PEFT looks on the Hub whether the vocabulary has grown.
        saved = peft.get_peft_model_state_dict(self, weights, adapter, save_embedding_layers=False)
        saved |= self.saved_in_full(weights)
        folder = Path(save_directory, ADAPTER_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        floats = {name: value.to(self.dtype) for name, value in saved.items() if value.is_floating_point()}
        named = {_PEFT_PREFIX + name: value.contiguous() for name, value in {**saved, **floats}.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.peft_config[adapter].save_pretrained(folder)
        config = copy.deepcopy(self.config)
        config.adapter_of, config.architectures = self.backbone_source, [type(self).__name__]
        config.dtype = str(self.dtype).removeprefix("torch.")
        config.save_pretrained(save_directory)
        if self.can_generate():
            self.generation_config.save_pretrained(save_directory)


def linear_layers(model: Any, kinds: Sequence[str] | None = None) -> str:
    """Layers of a backbone as a pattern of their names, for LoRA: those of `kinds`, by default all that are linear.

    Raises ValueError for a layer name that the backbone does not have.
    """
    start = model.backbone_prefix
    layers = [name for name, layer in model.named_modules() if isinstance(layer, (Linear, Conv1D))]
    found = {name.rpartition(".")[2] for name in layers if name.startswith(start)}
    wrong = sorted(set(kinds or ()) - found)
    if wrong:
        raise ValueError(f"lora_target_modules: the backbone has no layer {wrong[0]!r}. Choose among {sorted(found)}.")
    return rf"{re.escape(start)}.*\.({'|'.join(sorted(kinds or found))})"


def _load_with_adapter(
    cls: Any,
    name: str | os.PathLike,
    config: Any,
    hub: Mapping[str, Any],
    *args: Any,
    backbone: str | None,
    merge: bool,
    **kwargs: Any,
) -> Any:
    """`from_pretrained` of a model `cls` for the folder of an adapter, whose options on the Hub are `hub`."""
    if peft is None:
        raise ValueError(f"{str(name)!r} is an adapter of a backbone and needs PEFT. Install it by pip install peft")
    config, of = copy.deepcopy(config), dict(config.adapter_of or {})
    config.adapter_of = None
    source = backbone or of["name"]
    if not source:
        raise ValueError(f"{str(name)!r} is an adapter that names no backbone. Pass backbone=FOLDER (--backbone).")
    place = {**hub, "subfolder": os.path.join(hub.get("subfolder") or "", ADAPTER_FOLDER)}
    access = {key: hub[key] for key in ("cache_dir", "local_files_only", "token") if key in hub}
    try:
        files = [cached_file(name, f"adapter_{file}", **place) for file in ("config.json", "model.safetensors")]
        folder, saved = os.path.dirname(str(files[0])), load_file(str(files[1]))
        with torch.random.fork_rng(devices=[]):  # loading draws nothing
            whole = cls.adapted_class()(config).float().eval()
            whole.load_backbone(source, **access)
            found, settings = whole.fingerprint(), peft.PeftConfig.from_pretrained(folder)
            plain = {key: value.clone() for key, value in whole.state_dict().items()} if not merge else {}
            adapted = peft.PeftModel.from_pretrained(whole, folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{str(name)!r} is an adapter of the backbone {source!r}. Adapter and backbone cannot be loaded "
            f"together. Pass the right backbone as backbone (--backbone). {' '.join(str(error).split())}"
        ) from error
    if found != of["sha256"]:
        raise ValueError(
            f"{str(name)!r} was not trained on the weights of {source!r}. Pass the folder or Hub name of its own "
            "backbone as backbone (--backbone)."
        )
    lora = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {*lora, *(_PEFT_PREFIX + key for key in whole.saved_in_full(whole.state_dict()))}
    if set(saved) != expected:
        wrong = sorted(set(saved) ^ expected)
        raise ValueError(f"{str(name)!r} lacks weights, or has unknown weights: {wrong[:3]}. Get the adapter again.")
    weights = adapted.merge_and_unload().state_dict() if merge else plain
    loaded = cls.from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = str(name)
    if not merge:
        model.backbone_source = of
        model.add_adapter(settings)
        peft.set_peft_model_state_dict(model, saved)
        model.eval()
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(name, **hub)
    return loaded
