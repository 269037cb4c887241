"""A Tree LM that begins with the weights of a decoder, LoRA on them, and folders that hold what LoRA learned.

`TreeLMForCausalLM.add_adapter` freezes the backbone but for the adapters of its layers; the table of the labels and the
biases of both heads are trained in full. A folder of such a model has configuration, tokenizer and code like any other,
but no weights of the backbone. Its folder `adapter` has the format of PEFT: `adapter_config.json`, which names the
backbone, and `adapter_model.safetensors`. `from_pretrained` adds the adapter to the backbone, W + s B A: the model that
it returns is an ordinary Tree LM, whose search costs what that of plain weights costs.
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear, Parameter
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
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


class BackboneAdapterMixin(SyntacticPreTrainedModel):
    """Makes a language model of a backbone, adds LoRA to it, and saves what is trained."""

    config: TreeLMConfig
    model: Any
    lm_head: Any
    label_head: Any

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
        source.resize_token_embeddings(vocab_size + model.config.num_label_tokens)
        model._take_over(source)
        model.name_or_path = "" if os.path.isdir(name) else name
        return model.eval()

    @torch.no_grad()
    def _take_over(self, source: PreTrainedModel) -> None:
        """Copy the weights of a decoder, whose vocabulary holds the labels, too; check that nothing else is in it."""
        base, place = self.model, torch.arange(4)[None]
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

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add LoRA to the backbone; the table of the labels and the biases of the heads are trained in full.

        Args:
            adapter_config: `LoraConfig` of PEFT; its `target_modules` are layers of the backbone, see `linear_layers`.
            adapter_name: default: "default".
        """
        super().add_adapter(adapter_config, adapter_name)
        for parameter in self._trained_in_full().values():
            parameter.requires_grad_(True)

    def _trained_in_full(self) -> dict[str, Parameter]:
        """What an adapter holds besides LoRA, by its names in the state dict."""
        names = ["model.embed_labels.weight", "lm_head.bias", "label_head.bias"]
        names += [] if self.config.tie_word_embeddings else ["label_head.weight"]
        return {name: self.get_parameter(name) for name in names}

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model, or, after `add_adapter`, what is trained without the backbone."""
        if not self._hf_peft_config_loaded:
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        weights = dict(kwargs.get("state_dict") or self.state_dict())
        adapter = self.active_adapters()[0]
        # Without `save_embedding_layers`, PEFT looks on the Hub whether the vocabulary has grown.
        saved = peft.get_peft_model_state_dict(self, weights, adapter, save_embedding_layers=False)
        saved |= {name: weights[name] for name in self._trained_in_full()}
        saved = {
            f"base_model.model.{name}": value.to(self.dtype).contiguous() for name, value in saved.items()
        }  # names of PEFT
        folder = Path(save_directory, ADAPTER_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.peft_config[adapter].save_pretrained(folder)
        self.config.architectures, self.config.dtype = [type(self).__name__], str(self.dtype).removeprefix("torch.")
        self.config.save_pretrained(save_directory)
        self.generation_config.save_pretrained(save_directory)
        if kwargs.get("push_to_hub"):
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).resolve().name), token=kwargs.get("token"))


def linear_layers(model: Any, kinds: Sequence[str] | None = None) -> str:
    """Layers of a backbone as a pattern of their names, for LoRA: those of `kinds`, by default all that are linear.

    Raises ValueError for a kind that the backbone has not.
    """
    found = {n.rpartition(".")[2] for n, m in model.model.backbone.named_modules() if isinstance(m, (Linear, Conv1D))}
    wrong = sorted(set(kinds or ()) - found)
    if wrong:
        raise ValueError(f"lora_target_modules: the backbone has no layer {wrong[0]!r}. Choose among {sorted(found)}.")
    return rf"model\.backbone\..*\.({'|'.join(sorted(kinds or found))})"


def find_adapter(name: str | os.PathLike | None, options: Mapping[str, Any]) -> str | None:
    """The folder with the adapter of a model folder or a repository of the Hub, downloaded; None if it has none.

    `options` are those of `from_pretrained`.
    """
    if name is None:
        return None
    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    hub["subfolder"] = os.path.join(options.get("subfolder", ""), ADAPTER_FOLDER)
    settings = cached_file(name, "adapter_config.json", _raise_exceptions_for_missing_entries=False, **hub)
    if settings is None:
        return None
    cached_file(name, "adapter_model.safetensors", **hub)
    return os.path.dirname(settings)


def load_with_adapter(
    cls: Any,
    language_model: Any,
    name: str | os.PathLike,
    adapter: str,
    backbone: str | None,
    merge: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`from_pretrained` of a model `cls` for a folder whose adapter is in the folder `adapter`."""
    if peft is None:
        raise ValueError(f"{str(name)!r} is an adapter of a backbone, which needs PEFT: pip install peft")
    hub = {key: kwargs[key] for key in (*_HUB_OPTIONS, "subfolder") if key in kwargs}
    config = kwargs.pop("config", None) or cls.config_class.from_pretrained(name, **hub)
    settings = json.loads(Path(adapter, "adapter_config.json").read_text(encoding="utf-8"))
    source = backbone or settings["base_model_name_or_path"]
    if not source:
        raise ValueError(f"{str(name)!r} is an adapter that names no backbone. Pass backbone=FOLDER (--backbone).")
    try:
        whole = language_model.from_backbone(source, config.nonterminals, linearization=config.linearization)
        if merge:
            whole = peft.PeftModel.from_pretrained(whole, adapter).merge_and_unload()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{str(name)!r} is an adapter of the backbone {source!r}, which cannot be loaded or does not fit. Pass the "
            f"folder or the Hub name of the right one as backbone (--backbone). {' '.join(str(error).split())}"
        ) from error
    loaded = cls.from_pretrained(None, *args, config=config, state_dict=whole.state_dict(), **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = str(name) if merge else settings["base_model_name_or_path"] or ""
    if not merge:
        model.add_adapter(peft.PeftConfig.from_pretrained(adapter))
        peft.set_peft_model_state_dict(model, load_file(Path(adapter, "adapter_model.safetensors")))
        model.eval()
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(name, **hub)
    return loaded
