# SPDX-License-Identifier: Apache-2.0
"""Base of all models (no CPU or disk offloading), temporary eval mode, and weights with LoRA adapters.

Charts, stacks and recurrences read the weights of their layers without calling these layers. An adapter of PEFT acts
when its layer is called, so `weight_of` adds its part to the weight,

    W' = W + s B A

and recognizes adapters by their attributes (PEFT may be missing). Offloading fetches weights when a layer is called, so
`SyntacticPreTrainedModel` rejects it, and devices between which the weights would have to travel.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_synlm.core.cache import CACHE_NAMES, takes_both_names


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Temporarily put a model in eval mode; afterwards every module has the mode that it had before."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def also_takes(common: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method that passes its `**options` on to `common`, whose keyword-only arguments its signature names.

    Trainer, `generate` and PEFT look for the arguments of a model in the signature of `forward`.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        signature, more = inspect.signature(method), inspect.signature(common).parameters.values()
        *own, options = signature.parameters.values()
        named = [one for one in more if one.kind is one.KEYWORD_ONLY and one.name not in signature.parameters]
        # `inspect` reads it; the type of a function does not declare it.
        method.__signature__ = signature.replace(parameters=[*own, *named, options])  # type: ignore[attr-defined]
        return method

    return decorate


def saved_whole(lstm: nn.LSTM) -> nn.LSTM:
    """Let an LSTM be saved from a GPU, where its weights are views of one block, which safetensors refuses."""
    lstm.register_state_dict_post_hook(_own_memory)
    return lstm


def _own_memory(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, weight in state.items():
        shares = not isinstance(weight, nn.Parameter) and weight.untyped_storage().nbytes() > weight.nbytes
        if name.startswith(prefix) and shares:
            state[name] = weight.clone()


class SyntacticPreTrainedModel(PreTrainedModel):
    """What transformers has to know of every model; a `device_map` over several devices is rejected."""

    base_model_prefix = "model"
    accepts_loss_kwargs = False  # every part of the loss has a normalizer of its own
    # No module is a shard: layers read weights of each other, and methods of parts run without hooks.
    _no_split_modules: list[str] = []
    _skip_keys_device_placement = list(CACHE_NAMES)
    _input_embed_layer = "embed_tokens"

    def word_ends_of(self, input_ids: Tensor) -> Tensor | None:
        """Hook: which tokens end a word, for ids of any shape; None where every token does."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "past_key_values" in inspect.signature(cls.forward).parameters:
            cls.forward = takes_both_names(cls.forward)
        if issubclass(cls, GenerationMixin):
            # Trainer shifts labels only for the classes in this table when it smooths them (label_smoothing_factor).
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __setattr__(self, name: str, value: Any) -> None:
        # TRL's trainers put a cross entropy of the base model's states in the place of `forward`.
        if name == "forward" and "fused_lm_head" in (getattr(value, "__kwdefaults__", None) or ()):
            raise ValueError(
                f"A trainer of TRL replaces the loss of {type(self).__name__} by a cross entropy of "
                "`last_hidden_state` and the output layer. This model has another loss. Use Trainer of transformers."
            )
        super().__setattr__(name, value)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """Load a model as transformers does. Raises ValueError if it would be spread over several devices."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if "disk" in places or len(places) > 1:
            raise ValueError(
                f"device_map={kwargs.get('device_map')!r} puts parts of {cls.__name__} on {sorted(places)}, but it "
                "cannot be split: its layers read the weights of inner layers. Load it on one device "
                '(device_map={"": 0} or {"": "cpu"}), or in a smaller type (dtype="bfloat16").'
            )
        return loaded


def weight_of(layer: Any, name: str = "weight") -> Tensor:
    """The weight of a layer plus what its active LoRA adapters add to it; gradients reach both.

    Raises ValueError for wrappers other than LoRA, for options of LoRA that are not such a sum (dropout in training,
    biases, DoRA, adapters by text), and for quantized weights that cannot be read directly. Without adapters it is
    free.
    """
    added: list[Tensor] = []
    for wrapper in _wrappers(layer):
        _check(wrapper, layer)
        if getattr(wrapper, "parameter_name", "weight") == name and not (wrapper.merged or wrapper.disable_adapters):
            active = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.scaling]
            added += [wrapper.get_delta_weight(adapter) for adapter in active]
        layer = wrapper.base_layer
    weight = _in_floating_point(getattr(layer, name), layer)
    for part in added:
        weight = weight + part.to(weight.dtype)
    return weight


def check_tied_words(model: Any) -> None:
    """Raise ValueError if PEFT trains a copy of one of the two matrices of the words, which such a model has as one."""
    if model.training and model.model.embed_tokens.weight is not model.lm_head.weight:
        raise ValueError(
            f"{type(model).__name__} reads and writes words with one matrix. PEFT would train a copy of this matrix, "
            "and the copy could not be saved. Leave embed_tokens and lm_head out of modules_to_save."
        )


def is_adapted(layer: Any) -> bool:
    """Whether a layer is wrapped by an adapter."""
    return getattr(layer, "base_layer", None) is not None


def unwrapped(layer: Any) -> Any:
    """The layer inside its adapters, for what they do not change: sizes and biases."""
    for wrapper in _wrappers(layer):
        layer = wrapper.base_layer
    return layer


def _wrappers(layer: Any) -> Iterator[Any]:
    """Wrappers around a layer, the outermost first."""
    while is_adapted(layer):
        yield layer
        layer = layer.base_layer


def _in_floating_point(weight: Tensor, layer: Any) -> Tensor:
    """The weight, dequantized."""
    # The first condition keeps names of modules out of compiled code.
    if type(weight) is not nn.Parameter and type(weight).__module__.startswith("torchao."):
        return weight.dequantize()
    # Integers, and floats of one byte, need scales that are stored elsewhere.
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"A weight of {type(layer).__name__} [{weight.shape}] has type {weight.dtype}. The model reads this "
            "weight directly and can do so only in formats of torchao. Leave this layer out of the quantization "
            "(llm_int8_skip_modules), or use TorchAoConfig."
        )
    return weight


def _check(wrapper: Any, layer: Any) -> None:
    """Raise ValueError for wrappers whose effect is not a sum of weights."""
    kind = type(unwrapped(layer)).__name__
    if not (hasattr(wrapper, "lora_A") and hasattr(wrapper, "get_delta_weight")):
        raise ValueError(
            f"A layer ({kind}) is wrapped by {type(wrapper).__module__}.{type(wrapper).__name__}. The model reads "
            "this layer's weight directly, which only LoRA allows. Use LoRA, or no such layer in target_modules."
        )
    if getattr(unwrapped(layer), "groups", 1) != 1:
        raise ValueError(
            f"PEFT cannot write the adapter of a grouped layer ({kind}) as a sum of weights. Leave this layer out of "
            "target_modules."
        )
    # PEFT passes the adapter of each text to its layers by hooks, when they are called; this one is not called.
    told = sorted({key for hook in wrapper._forward_pre_hooks.values() for key in getattr(hook, "keywords", ())})
    if told:
        raise ValueError(
            f"{', '.join(told)} was given, but a layer ({kind}) with adapters has one weight for all texts. Load the "
            "model again, because PEFT keeps the option after an error. Then choose an adapter by set_adapter, or "
            "leave the layer out of target_modules."
        )
    for adapter in wrapper.active_adapters:
        dropout = wrapper.lora_dropout[adapter] if adapter in wrapper.lora_dropout else None
        more = []
        if isinstance(dropout, nn.Dropout) and dropout.p > 0 and wrapper.training:
            more.append(f"lora_dropout={dropout.p}")
        if wrapper.lora_bias.get(adapter):
            more.append("lora_bias=True")
        if adapter in wrapper.lora_variant:
            more.append(type(wrapper.lora_variant[adapter]).__name__)
        if more:
            raise ValueError(
                f"Adapter {adapter!r} of a layer ({kind}) has {', '.join(more)}, but this layer's weight is read "
                "directly, as a sum of weights. Leave out this option, or leave the layer out of target_modules."
            )
