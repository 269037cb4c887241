"""Which tests of transformers our models do not run, and why. This is the only list.

An entry leaves out tests for some architectures, or for some of their classes. A test that skips itself and is not in
the list fails.
"""

import re
from typing import NamedTuple

ARCHITECTURES = (
    "gpst", "rnng", "tree_lm", "urnng", "pushdown", "pcfg", "on_lstm", "prpn", "palm", "ordered_memory", "lstm"
)  # fmt: skip
RECURRENT = ("on_lstm", "prpn", "palm", "ordered_memory", "lstm")


class Skip(NamedTuple):
    """Tests that are left out."""

    tests: str
    """Regular expression that matches the whole name."""
    reason: str
    architectures: tuple[str, ...] = ARCHITECTURES
    classes: tuple[str, ...] = ()
    """Endings of the classes that are left out; empty means all."""


DERIVATIONS = ("rnng", "tree_lm", "urnng", "pushdown")
_NO_ATTENTION = (*DERIVATIONS, "pcfg", *RECURRENT)
_TIED = ("rnng", "urnng", "pushdown", "lstm")
_CAUSAL = ("ForCausalLM",)
_HEADS = ("ForCausalLM", "ForSequenceClassification")
_HIDDEN_STATES = "tests/core/test_hidden_states.py"

SKIPS: tuple[Skip, ...] = (
    # These need a GPU or another library.
    Skip("test_flash_attn_.*", "needs a GPU and flash-attention"),
    Skip("test_(flex_attention_with_grads|can_load_with_(device_context_manager|global_device_set))", "needs a GPU"),
    Skip("test_sdpa_can_(compile_dynamic|dispatch_on_flash)", "needs a GPU"),
    Skip("test_kernels_can_load_without_crashing", "needs a GPU and the kernels library"),
    Skip("test_.*_with_deepspeed.*", "needs a GPU and DeepSpeed; we train with DDP and FSDP"),
    Skip("test_torch_compile_for_training", "needs a GPU and a forward pass that is one graph"),
    Skip("test_(cpu_offload|disk_offload_(bin|safetensors)|model_parallelism)",
         "needs GPUs; offloading is an error (tests/core/test_module_tools.py)"),
    # No architecture has what these test.
    Skip("test_.*rope.*", "no model uses the rotary embeddings of transformers"),
    Skip("test_(eager_matches_batched_and_grouped_inference.*|.*router_logits.*)", "no model has experts"),
    Skip("test_(tp_plan_matches_params|tied_head_has_a_tp_plan_entry)", "no model has a plan for tensor parallelism"),
    Skip("test_(reverse_loading_mapping|can_load_from_already_mapped_keys)",
         "no model renames weights when it loads; hf_synlm.conversion does that"),
    Skip("test_keep_in_fp32_modules.*", "no module must stay in float32: log-probabilities always do"),
    Skip("test_sliding_window_mask", "no model attends in a sliding window"),
    Skip("test_encoder_decoder_loss_no_double_shift", "no model has an encoder and a decoder"),
    Skip("test_resize_position_vector_embeddings", "the configuration fixes the number of positions"),
    Skip("test_inputs_embeds.*", "the search reads token ids, not vectors", ("gpst", *DERIVATIONS)),
    Skip("test_inputs_embeds.*", "the grammar writes token ids and reads no vectors", ("pcfg",)),
    Skip("test_(internal_model_config_and_subconfig_are_same|(?!.*non_composite).*composite_models?)",
         "no configuration contains another"),
    Skip("test_(get_(text|image|audio|video)_features_.*|multimodal_outputs_are_returned)",
         "no model reads images, sound or video"),
    Skip("test_bc_cache_name_forward",
         "asks for caches of keys; ours hold a search or a recurrence and keep both names (tests/versions)"),
    # Tests of generation are not in the source distribution.
    Skip("test_generation_tester_mixin_inheritance", "tests/search/test_generation_contract.py tests the same"),
    # Attention weights and outputs of layers.
    Skip("test_(eager_matches_sdpa_inference.*|sdpa_can_dispatch_non_composite_models|can_set_attention_dynamically)",
         "the model has no attention of transformers", _NO_ATTENTION),
    Skip("test_attention_outputs", f"the model has no attention, and says so in an error ({_HIDDEN_STATES})",
         (*DERIVATIONS, "on_lstm", "ordered_memory", "lstm")),
    Skip("test_attention_outputs",
         f"one head attends to memory slots or spans: [B, T, N], not [B, H, T, T] ({_HIDDEN_STATES})",
         ("prpn", "palm")),
    Skip("test_(capture_outputs_decorator|can_capture_specific_layers_hidden_states)",
         f"forward collects the states itself, because it moves tokens for padding ({_HIDDEN_STATES})", _NO_ATTENTION),
    Skip("test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions",
         f"sdpa computes no attention weights, and the model says so in an error ({_HIDDEN_STATES})", ("gpst",)),
    Skip("test_(hidden_states_output|attention_outputs|model_outputs_equivalence|capture_outputs_decorator"
         "|can_capture_specific_layers_hidden_states|eager_matches_sdpa_inference.*)",
         f"the logits are sums over trees, whose layers see different sequences: an error ({_HIDDEN_STATES})",
         ("gpst",), _CAUSAL),
    Skip("test_batching_equivalence",
         "asks for hidden states, which the language model refuses (tests/models/test_contract.py compares rows)",
         ("gpst",), _CAUSAL),
    Skip("test_retain_grad_hidden_states_attentions",
         "the first hidden states are a copy, in another order, of what the layers read",
         ("gpst", *DERIVATIONS, "prpn", "lstm")),
    Skip("test_model_outputs_equivalence", f"subtracts a boolean field ({_HIDDEN_STATES} compares tuples)", ("lstm",)),
    # RNNG, and models with derivations.
    Skip("test_causal_lm_loss_honors_shift_labels",
         "labels can leave out words of a derivation, or sentences, not replace", (*DERIVATIONS, "pcfg")),
    Skip("test_load_save_without_tied_weights", "the embeddings are always tied", ("rnng", "urnng")),
    Skip("test_load_with_mismatched_shapes", "draws the padding id as a word", DERIVATIONS),
    # URNNG.
    Skip("test_(batching_equivalence|hidden_states_output|model_outputs_equivalence)",
         "asks for hidden states of tokens, but the states stand before actions (tests/models/test_contract.py)",
         ("urnng",)),
    # PCFG.
    Skip("test_(attention_outputs|batching_equivalence|hidden_states_output|model_outputs_equivalence"
         "|retain_grad_hidden_states_attentions)",
         "asks for hidden states, which a grammar does not have, and says so in an error (tests/models/pcfg)",
         ("pcfg",)),
    # Weights.
    Skip("test_can_init_all_missing_weights",
         "compares random numbers, but the bias of the tied output layer is drawn in another order", _TIED,
         (*_HEADS, "RNNGModel", "URNNGModel", "PushdownModel")),
    Skip("test_bc_torch_dtype", "loads every class fourteen times; the base model stands for all", classes=_HEADS),
    Skip("test_enable_input_require_grads_with_gradient_checkpointing",
         "gradient checkpointing is for the Transformer layers of GPST", _NO_ATTENTION),
)  # fmt: skip


def skip_of(architecture: str, test: str) -> Skip | None:
    """The first entry that leaves out a test, or classes of it."""
    for skip in SKIPS:
        if architecture in skip.architectures and re.fullmatch(skip.tests, test):
            return skip
    return None
