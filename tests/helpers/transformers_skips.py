"""Which of transformers' own tests our models do not run, and why: the only list of these.

An entry leaves out a test for some architectures, or only some of their classes. Nothing else may be left out: a test
that skips itself without standing here fails.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ARCHITECTURES = ("gpst", "rnng", "tree_lm", "urnng", "pushdown", "on_lstm", "prpn", "palm", "ordered_memory", "lstm")
RECURRENT = ("on_lstm", "prpn", "palm", "ordered_memory", "lstm")


class Skip(NamedTuple):
    """Tests that are left out."""

    tests: str
    """Regular expression that fits the whole name."""
    reason: str
    architectures: tuple[str, ...] = ARCHITECTURES
    classes: tuple[str, ...] = ()
    """Endings of the classes that are left out; none = all."""


DERIVATIONS = ("rnng", "tree_lm", "urnng", "pushdown")
_NO_ATTENTION = (*DERIVATIONS, *RECURRENT)
_LANGUAGE_MODEL = ("ForCausalLM",)

SKIPS: tuple[Skip, ...] = (
    # ---------------------------------------------------------------------- needs another machine or another library
    Skip("test_flash_attn_.*", "needs the flash-attention library and a GPU; GPST runs on eager and sdpa attention"),
    Skip("test_flex_attention_with_grads", "needs a GPU; no model claims flex attention"),
    Skip("test_kernels_can_load_without_crashing", "needs a GPU and the kernels library"),
    Skip(
        "test_(cpu_offload|disk_offload_(bin|safetensors)|model_parallelism)",
        "needs GPUs; layers read weights of their parts without calling them, so that offloading is an error "
        "(tests/core/test_module_tools.py)",
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
    Skip(
        "test_keep_in_fp32_modules.*",
        "no module has to stay in float32: log-probabilities are, whatever the type of the weights",
    ),
    Skip("test_sliding_window_mask", "no model attends in a sliding window"),
    Skip("test_encoder_decoder_loss_no_double_shift", "no model is an encoder with a decoder"),
    Skip(
        "test_resize_position_vector_embeddings",
        "positions are no part of the vocabulary; their number is fixed by the configuration",
    ),
    Skip(
        "test_inputs_embeds.*",
        "the search reads token ids, not vectors: trees and word boundaries are those of the ids",
        ("gpst", *DERIVATIONS),
    ),
    Skip(
        "test_(internal_model_config_and_subconfig_are_same|attn_implementation_composite_models"
        "|can_set_attention_dynamically_composite_model|sdpa_can_dispatch_composite_models)",
        "no configuration has others inside",
    ),
    Skip(
        "test_get_(text|image|audio|video)_features_.*",
        "no model reads images, sound or video",
    ),
    # ------------------------------------------------------------------------------------------------------ generation
    Skip(
        "test_generation_tester_mixin_inheritance",
        "asks for tests of generation, which the source distribution does not hold; "
        "tests/search/test_generation_contract.py asks for the same",
    ),
    # ---------------------------------------------------------------------------------- attention, and layers' outputs
    Skip(
        "test_(eager_matches_sdpa_inference.*|sdpa_can_dispatch_non_composite_models|can_set_attention_dynamically)",
        "a recurrent network has no attention to choose an implementation for",
        _NO_ATTENTION,
    ),
    Skip(
        "test_attention_outputs",
        "no attention, which output_attentions says in an error (tests/core/test_hidden_states.py)",
        (*DERIVATIONS, "on_lstm", "ordered_memory", "lstm"),
    ),
    Skip(
        "test_attention_outputs",
        "attention is over memory slots or spans, in one head: [B, T, N], not [B, H, T, T] "
        "(tests/core/test_hidden_states.py)",
        ("prpn", "palm"),
    ),
    Skip(
        "test_(capture_outputs_decorator|can_capture_specific_layers_hidden_states)",
        "is about the hooks of transformers; states of tokens that were moved for padding have to be moved back, so "
        "that forward collects them itself (tests/core/test_hidden_states.py)",
        _NO_ATTENTION,
    ),
    Skip(
        "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions",
        "sdpa computes no attention weights, which output_attentions says in an error instead of returning none "
        "(tests/core/test_hidden_states.py)",
        ("gpst",),
    ),
    Skip(
        "test_(hidden_states_output|attention_outputs|model_outputs_equivalence|capture_outputs_decorator"
        "|can_capture_specific_layers_hidden_states|eager_matches_sdpa_inference.*)",
        "next-token logits are summed over many trees, whose layers see different sequences: asking for their states "
        "is an error (tests/core/test_hidden_states.py, which also compares attention implementations in the search)",
        ("gpst",),
        _LANGUAGE_MODEL,
    ),
    Skip(
        "test_batching_equivalence",
        "asks for hidden states, which the language model refuses (tests/models/gpst/test_modeling_gpst.py and "
        "tests/core/test_hidden_states.py compare rows)",
        ("gpst",),
        _LANGUAGE_MODEL,
    ),
    Skip(
        "test_retain_grad_hidden_states_attentions",
        "the first hidden states are a copy, in the order of the input's columns, of what the layers read: gradients "
        "flow from it to the embeddings, but not from the output to the copy",
        ("gpst", *DERIVATIONS, "prpn", "lstm"),
    ),
    Skip(
        "test_model_outputs_equivalence",
        "subtracts outputs, of which `token_mask` is boolean (tests/core/test_hidden_states.py compares tuples)",
        ("lstm",),
    ),
    # ----------------------------------------------------------------------------------------------------------- RNNG
    Skip(
        "test_causal_lm_loss_honors_shift_labels",
        "a derivation says which words there are: labels can leave words out, but not replace them",
        DERIVATIONS,
    ),
    Skip(
        "test_load_save_without_tied_weights",
        "words are read and written with one matrix, which the configuration says in an error",
        ("rnng", "urnng"),
    ),
    Skip(
        "test_load_with_mismatched_shapes",
        "draws the padding id as a word, of which the search finds no tree",
        DERIVATIONS,
    ),
    # ---------------------------------------------------------------------------------------------------------- URNNG
    Skip(
        "test_(batching_equivalence|hidden_states_output|model_outputs_equivalence)",
        "asks for hidden states of tokens, which the model refuses: it returns those before actions "
        "(tests/models/urnng/test_modeling_urnng.py compares rows)",
        ("urnng",),
    ),
    Skip("test_torch_save_load", "without heads there is no search, and so no class for AutoModel", ("urnng",)),
    # -------------------------------------------------------------------------------------------------------- weights
    Skip(
        "test_can_init_all_missing_weights",
        "compares random numbers: the bias of the tied output layer is drawn after its weight, or without one, from "
        "the same distribution",
        ("rnng", "urnng", "pushdown", "lstm"),
        (*_LANGUAGE_MODEL, "ForSequenceClassification", "RNNGModel", "URNNGModel", "PushdownModel"),
    ),
    Skip(
        "test_bc_torch_dtype",
        "loads every class fourteen times; all classes load in the same way, so that the base model stands for them",
        classes=(*_LANGUAGE_MODEL, "ForSequenceClassification"),
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
