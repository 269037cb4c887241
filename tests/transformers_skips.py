"""Which of transformers' own tests our models do not run, and why: the only list of these.

An entry leaves out a test for some architectures, or only some of their classes. Nothing else may be left out: a test
that skips itself without standing here fails.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ARCHITECTURES = ("gpst", "rnng", "on_lstm", "prpn", "palm", "lstm")
RECURRENT = ("on_lstm", "prpn", "palm", "lstm")


class Skip(NamedTuple):
    """Tests that are left out."""

    tests: str
    """Regular expression that fits the whole name."""
    reason: str
    architectures: tuple[str, ...] = ARCHITECTURES
    classes: tuple[str, ...] = ()
    """Endings of the classes that are left out; none = all."""


_NO_ATTENTION = ("rnng", *RECURRENT)
_WITHOUT_SEARCH = ("rnng", *RECURRENT)

SKIPS: tuple[Skip, ...] = (
    # ---------------------------------------------------------------------- needs another machine or another library
    Skip("test_flash_attn_.*", "needs the flash-attention library and a GPU; GPST runs on eager and sdpa attention"),
    Skip("test_flex_attention_with_grads", "needs a GPU; no model claims flex attention"),
    Skip("test_kernels_can_load_without_crashing", "needs a GPU and the kernels library"),
    Skip(
        "test_(cpu_offload|disk_offload_(bin|safetensors)|model_parallelism)",
        "needs one or several GPUs; tests/test_ecosystem.py offloads to CPU and disk without one",
    ),
    Skip(
        "test_can_load_with_(device_context_manager|global_device_set)",
        "needs a GPU",
    ),
    Skip("test_.*_with_deepspeed.*", "needs DeepSpeed and a GPU; training is made for DDP and FSDP"),
    Skip("test_sdpa_can_(compile_dynamic|dispatch_on_flash)", "needs a GPU"),
    Skip("test_torch_compile_for_training", "needs a GPU, and a model whose forward is one graph"),
    # ------------------------------------------------------------------------- is about what no architecture here has
    Skip("test_.*rope.*", "no model has rotary embeddings of transformers (GPST's parser computes its own)"),
    Skip(
        "test_(eager_matches_batched_and_grouped_inference.*|moe_models_record_router_logits"
        "|output_router_logits_from_config)",
        "no model has experts",
    ),
    Skip("test_(tp_plan_matches_params|tied_head_has_a_tp_plan_entry)", "no model has a plan for tensor parallelism"),
    Skip(
        "test_(reverse_loading_mapping|can_load_from_already_mapped_keys)",
        "no model renames weights on loading; checkpoints of the authors go through hf_synlm.conversion",
    ),
    Skip("test_keep_in_fp32_modules.*", "no module has to stay in float32: log-probabilities are computed in it anyway"),
    Skip("test_sliding_window_mask", "no model attends in a sliding window"),
    Skip("test_encoder_decoder_loss_no_double_shift", "no model is an encoder with a decoder"),
    Skip(
        "test_resize_position_vector_embeddings",
        "positions are no part of the vocabulary; their number is fixed by the configuration",
    ),
    Skip(
        "test_inputs_embeds.*",
        "models read token ids, not vectors: trees and word boundaries are those of the ids",
    ),
    Skip("test_internal_model_config_and_subconfig_are_same", "no configuration has others inside"),
    Skip(
        "test_get_(text|image|audio|video)_features_.*",
        "no model reads images, sound or video",
    ),
    # ------------------------------------------------------------------------------------------------------ generation
    Skip(
        "test_generation_tester_mixin_inheritance",
        "asks for tests of generation, which the source distribution does not hold; see tests/test_generation_*.py and "
        "tests/test_recurrent_models.py",
    ),
    # ---------------------------------------------------------------------------------- attention, and layers' outputs
    Skip(
        "test_(eager_matches_sdpa_inference.*|sdpa_can_dispatch.*|attn_implementation_composite_models"
        "|can_set_attention_dynamically.*)",
        "a recurrent network has no attention to choose an implementation for",
        _NO_ATTENTION,
    ),
    Skip(
        "test_attention_outputs",
        "no attention, which output_attentions says in an error (tests/test_layer_outputs.py)",
        ("rnng", "on_lstm", "lstm"),
    ),
    Skip(
        "test_attention_outputs",
        "attention is over memory slots or spans, in one head: [B, T, N], not [B, H, T, T] "
        "(tests/test_layer_outputs.py)",
        ("prpn", "palm"),
    ),
    Skip(
        "test_(capture_outputs_decorator|can_capture_specific_layers_hidden_states)",
        "is about the hooks of transformers; states of tokens that were moved for padding have to be moved back, so "
        "that forward collects them itself (tests/test_layer_outputs.py)",
        _NO_ATTENTION,
    ),
    Skip(
        "test_enable_input_require_grads_with_gradient_checkpointing",
        "gradient checkpointing is for the Transformer layers of GPST",
        _NO_ATTENTION,
    ),
)


def skip_of(architecture: str, test: str) -> Skip | None:
    """The entry that leaves out a test, or classes of it.

    Args:
        architecture: one of `ARCHITECTURES`.
        test: name of the test.

    Returns:
        The first entry, or None.
    """
    for skip in SKIPS:
        if architecture in skip.architectures and re.fullmatch(skip.tests, test):
            return skip
    return None
