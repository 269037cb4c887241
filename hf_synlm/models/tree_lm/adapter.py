"""A Tree LM that begins with the weights of a decoder, LoRA on them, and folders that hold what LoRA learned.

`TreeLMForCausalLM.add_adapter` freezes the backbone but for the adapters of its layers; the table of the labels and
their biases are trained in full; the biases of words, which would learn how frequent words are, stay. A folder of such
a model has configuration, tokenizer and code like any other, but no weights of the backbone, which `adapter_of` of its
configuration names. Its folder `adapter` has the format of PEFT. `from_pretrained` adds the adapter to the backbone,
W + s B A: the model that it returns is an ordinary Tree LM, whose search costs what that of plain weights costs.
"""

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from hf_synlm.core.module_tools import SyntacticPreTrainedModel
from hf_synlm.models.tree_lm.backbone import check_backbone
from hf_synlm.models.tree_lm.configuration_tree_lm import TreeLMConfig

try:  # for adapters only
    import peft
except ImportError:
    peft = None

ADAPTER_FOLDER = "adapter"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token", "subfolder")
_PEFT_PREFIX = "base_model.model."


class BackboneAdapterMixin(SyntacticPreTrainedModel):
    """Makes a language model of a backbone, adds LoRA to it, and saves what is trained."""

    config: TreeLMConfig
    model: Any
    lm_head: Any
    label_head: Any
    # Name and fingerprint of the backbone, for models whose weights are still its own but for an adapter.
    backbone_source: dict[str, Any] | None = None
    adapts_backbone = False
    _hf_peft_config_loaded = False

    @classmethod
    def from_backbone(
        cls, name: str, nonterminals: Sequence[str], *, dtype: torch.dtype = torch.float32, **fields: Any
    ) -> Self:
        """Make a Tree LM of a decoder of the Hub, such as GPT-2, Llama or Qwen, whose weights it keeps.

        Given the same ids it computes what the decoder computes. The rows of the labels are drawn around the mean of
        the words', as transformers does for new tokens. What it knows of trees it has to learn: train it on a treebank.

        Args:
            name: folder or Hub name of a causal language model with full attention.
            nonterminals: labels.
            dtype: of the weights.
            **fields: of `TreeLMConfig`.

        Returns:
            The model.

        Raises:
            ValueError: the model is not a decoder, or its attention does not see all positions before.
        """
        source = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        backbone, vocab_size = copy.deepcopy(source.config), source.get_input_embeddings().num_embeddings
        check_backbone(backbone)
        end = backbone.eos_token_id[0] if isinstance(backbone.eos_token_id, list) else backbone.eos_token_id
        special = {"bos_token_id": backbone.bos_token_id, "pad_token_id": backbone.pad_token_id}
        special = {name: end if token is None else token for name, token in special.items()}
        decided = {"tie_word_embeddings": backbone.tie_word_embeddings, "eos_token_id": end, **special}
        sizes = {"vocab_size": vocab_size, "nonterminals": list(nonterminals), "backbone_config": backbone}
        model = cls(cls.config_class(**{**decided, **fields, **sizes})).to(dtype)
        model._take_over(source)
        model.backbone_source = {"name": None if os.path.isdir(name) else str(name), "sha256": model._fingerprint()}
        return model.eval()

    @torch.no_grad()
    def _take_over(self, source: PreTrainedModel) -> None:
        """Copy the weights of a decoder, whose vocabulary gets the labels; check that nothing else is in it."""
        base, place = self.model, torch.arange(4)[None]
        source.resize_token_embeddings(self.config.vocab_size + self.config.num_label_tokens)
        expected = source(place).logits[..., : self.config.vocab_size]
        tables = [
            (source.get_input_embeddings(), (base.embed_tokens, base.embed_labels)),
            (source.get_output_embeddings(), (self.lm_head, self.label_head)),
        ]
        for table, parts in tables:
            for name, value in table.named_parameters():
                for part, rows in zip(parts, value.tensor_split([self.config.vocab_size]), strict=True):
                    getattr(part, name).copy_(rows)
        source.base_model.set_input_embeddings(None)
        base.backbone.load_state_dict(source.base_model.state_dict())
        distance = place[:, :, None] - place[:, None]
        found = self.lm_head(self.eval().model.decode(base.embed(place), distance >= 0, distance.clamp(min=0))[-1])
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(source).__name__} scales or caps its logits, which a Tree LM does not. Choose another decoder."
            )

    def _fingerprint(self) -> str:
        """Hash of the weights that an adapter leaves out: the first numbers of each, as bfloat16."""
        digest = hashlib.sha256()
        weights = self.state_dict()
        for name in sorted(filter(_is_of_backbone, weights)):
            start = weights[name].flatten()[:8].to("cpu", torch.bfloat16)
            digest.update(start.float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _saved_in_full(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What an adapter holds besides LoRA: all but the backbone, and once what is tied."""
        tied = {"label_head.weight"} if self.config.tie_word_embeddings else set()
        return {n: value for n, value in weights.items() if not _is_of_backbone(n) and n not in tied}

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add LoRA to the backbone; the table of the labels and their biases are trained in full.

        On other weights than those of `from_backbone`, this is `add_adapter` of transformers.

        Args:
            adapter_config: `LoraConfig` of PEFT; its `target_modules` are layers of the backbone, see `linear_layers`.
            adapter_name: default: "default".

        Raises:
            ValueError: the model has an adapter already, or the adapter reaches beyond the backbone.
        """
        source = self.backbone_source
        if source is None or (not self._hf_peft_config_loaded and self._fingerprint() != source["sha256"]):
            super().add_adapter(adapter_config, adapter_name)
            return
        if self._hf_peft_config_loaded:
            raise ValueError("The model has an adapter. Save it, and load it by from_pretrained, which merges it.")
        # As in transformers, whose version 5.24 asks for a PEFT that is not released.
        self._hf_peft_config_loaded = True
        peft.inject_adapter_in_model(adapter_config, self, adapter_name or "default")
        adapter_config.base_model_name_or_path = source["name"]
        full = self._saved_in_full(dict(self.named_parameters()))
        beyond = [name for name in full if {"base_layer", "original_module", "modules_to_save"} & set(name.split("."))]
        if beyond:
            raise ValueError(
                f"The adapter reaches beyond the backbone ({beyond[0]}), but labels are trained in full. "
                "Take target_modules from linear_layers(model), leave out modules_to_save, and make the model anew."
            )
        for name, parameter in full.items():
            parameter.requires_grad_(name != "lm_head.bias")
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
            raise ValueError("push_to_hub=True: save the adapter without it, and call push_to_hub of the model.")
        if not kwargs.get("is_main_process", True):
            return
        weights = dict(kwargs.get("state_dict") or self.state_dict())
        (adapter,) = self.peft_config
        # Without `save_embedding_layers`, PEFT looks on the Hub whether the vocabulary has grown.
        saved = peft.get_peft_model_state_dict(self, weights, adapter, save_embedding_layers=False)
        saved |= self._saved_in_full(weights)
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
        self.generation_config.save_pretrained(save_directory)


def _is_of_backbone(name: str) -> bool:
    """Whether a parameter came from the backbone: its layers and the tables of the words."""
    return name.startswith("model.backbone.") or name in ("model.embed_tokens.weight", "lm_head.weight")


def linear_layers(model: Any, kinds: Sequence[str] | None = None) -> str:
    """Layers of a backbone as a pattern of their names, for LoRA: those of `kinds`, by default all that are linear.

    Raises ValueError for a kind that the backbone has not.
    """
    found = {n.rpartition(".")[2] for n, m in model.model.backbone.named_modules() if isinstance(m, (Linear, Conv1D))}
    wrong = sorted(set(kinds or ()) - found)
    if wrong:
        raise ValueError(f"lora_target_modules: the backbone has no layer {wrong[0]!r}. Choose among {sorted(found)}.")
    return rf"model\.backbone\..*\.({'|'.join(sorted(kinds or found))})"


def load_with_adapter(
    cls: Any,
    language_model: Any,
    name: str | os.PathLike,
    config: TreeLMConfig,
    hub: Mapping[str, Any],
    *args: Any,
    backbone: str | None,
    merge: bool,
    **kwargs: Any,
) -> Any:
    """`from_pretrained` of a model `cls` for the folder of an adapter, whose options on the Hub are `hub`."""
    if peft is None:
        raise ValueError(f"{str(name)!r} is an adapter of a backbone, which needs PEFT: pip install peft")
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
            whole = language_model(config).float().eval()
            whole._take_over(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **access).eval())
            found, settings = whole._fingerprint(), peft.PeftConfig.from_pretrained(folder)
            plain = {key: value.clone() for key, value in whole.state_dict().items()} if not merge else {}
            adapted = peft.PeftModel.from_pretrained(whole, folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{str(name)!r} is an adapter of the backbone {source!r}, and one of them cannot be loaded, or they do not "
            f"fit. Pass the right backbone as backbone (--backbone). {' '.join(str(error).split())}"
        ) from error
    if found != of["sha256"]:
        raise ValueError(
            f"{str(name)!r} is an adapter of other weights than those of {source!r}. Pass the folder or the Hub name "
            "of the backbone that it was trained on as backbone (--backbone)."
        )
    lora = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {*lora, *(_PEFT_PREFIX + key for key in whole._saved_in_full(whole.state_dict()))}
    if set(saved) != expected:
        wrong = sorted(set(saved) ^ expected)
        raise ValueError(f"{str(name)!r}: weights of the adapter are missing or too many: {wrong[:3]}. Get it again.")
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
