"""What users of transformers expect of a model, row by row and architecture by architecture, and which tests show it.

A cell names tests, or says why the architecture does not have the feature. Tests of transformers itself are named with
"transformers:"; where `transformers_skips` leaves one out for an architecture, its reason is the cell's.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import transformers_tests
from tests.transformers_skips import skip_of

TESTS = Path(__file__).parent
ARCHITECTURES = ("gpst", "rnng", "on_lstm", "prpn", "palm")
RECURRENT = ("on_lstm", "prpn", "palm")
NO = "no: "
TRANSFORMERS = "transformers:"


class Row(NamedTuple):
    """A feature: tests of all architectures, and those of some, or reasons why not."""

    expectation: str
    everywhere: tuple[str, ...] = ()
    gpst: tuple[str, ...] = ()
    rnng: tuple[str, ...] = ()
    recurrent: tuple[str, ...] = ()

    def cell(self, architecture: str) -> tuple[str, ...]:
        """Tests and reasons of an architecture."""
        own = self.recurrent if architecture in RECURRENT else getattr(self, architecture)
        return (*self.everywhere, *own)


_HUB, _ECO, _RECURRENT = "test_hub_roundtrip::", "test_ecosystem::", "test_recurrent_models::"
_GPST, _RNNG = "test_modeling_gpst::", "test_modeling_rnng::"
_SEARCH_GPST, _SEARCH_RNNG = "test_word_beam_search::", "test_rnng_fast_track::"
_GEN_GPST, _GEN_RNNG, _GEN = "test_generation_gpst::", "test_generation_rnng::", "test_recurrent_models::TestGenerate::"
_LAYERS, _COMPILE = "test_layer_outputs::", "test_compile_export::"
_SHARED_CODE = "no: exported by the same code as GPST, which is tested; the folder is verified for this architecture"
_STOCK = "no: the stock decoding loop on exact next-token log-probabilities; there is no search of its own"

ROWS = (
    Row(
        "a repository of code and weights loads without the package",
        ("test_clean_environment::test_torch_and_transformers_are_enough",),
        (_HUB + "TestExport::test_same_without_the_package",),
        (_HUB + "TestExport::test_rnng_is_the_same_without_the_package",),
        (_HUB + "test_recurrent_models",),
    ),
    Row(
        "every Auto class is in auto_map and works",
        ("test_public_api::test_model_is_registered_both_ways",),
        (_HUB + "TestExport::test_every_class_exports_all_auto_classes",),
        (_HUB + "TestExport::test_rnng_is_the_same_without_the_package",),
        (_HUB + "test_recurrent_models",),
    ),
    Row(
        "works from the Hub, pinned to a revision",
        (
            "test_clean_environment::test_torch_and_transformers_are_enough",
            _HUB + "test_incomplete_folder_is_not_pushed",
            "test_training_loop::test_checkpoints_on_the_hub",
        ),
    ),
    Row(
        "a fine-tuned copy keeps its code",
        (),
        (_HUB + "TestRemote::test_saving_the_remote_model_again_keeps_its_code",),
        (_SHARED_CODE,),
        ("test_train_recurrent::test_best_weights_are_saved_and_load_without_the_package",),
    ),
    Row("files are exportable", ("test_import_rules::test_r2_every_file_the_scanner_sees_exists",)),
    Row("no surprising dependency", ("test_import_rules::test_r1_loader_demands_nothing_else",)),
    Row("refusal without trust is clear", (_HUB + "TestRemote::test_refusal_without_trust_is_clear",)),
    Row("local use needs no flag", ("test_public_api::test_model_is_registered_both_ways",)),
    Row("save and load round trip", ("transformers:test_save_load",)),
    Row(
        "safetensors only",
        ("transformers:test_can_use_safetensors", _HUB + "TestExport::test_weights_are_safetensors_only"),
    ),
    Row(
        "missing and unexpected keys are told, base and heads load from each other",
        ("transformers:test_correct_missing_keys", "transformers:test_base_model_prefix_loads_base_weights"),
    ),
    Row(
        "buffers survive loading by way of the meta device",
        ("transformers:test_init_weights_can_init_buffers", "transformers:test_all_tensors_are_parameter_or_buffer"),
    ),
    Row("missing weights are initialized, loaded ones kept", ("transformers:test_can_init_all_missing_weights",)),
    Row(
        "types of weights",
        ("transformers:test_bc_torch_dtype",),
        (_GPST + "test_other_types",),
        (_RNNG + "test_precisions_agree", _SEARCH_RNNG + "test_other_precisions"),
        (_RECURRENT + "test_half_precision", _RECURRENT + "test_autocast"),
    ),
    Row(
        "device_map",
        ("test_device_map::test_one_device", "test_device_map::test_offloading_is_an_error"),
    ),
    Row("tied weights", ("transformers:test_tied_weights_keys", "transformers:test_load_save_without_tied_weights")),
    Row(
        "resized embeddings",
        ("transformers:test_resize_tokens_embeddings",),
        (_GPST + "test_resize_embeddings",),
        (_RNNG + "test_resizing_the_vocabulary",),
        (_RECURRENT + "test_tied_and_resized_embeddings",),
    ),
    Row(
        "configurations: round trip and validation",
        ("test_transformers_common::test_configuration",),
        (_GPST + "test_bad_configurations_are_named",),
        (_RNNG + "test_bad_configurations_are_named",),
        (_RECURRENT + "test_bad_configurations_are_named",),
    ),
    Row(
        "generation configurations: round trip",
        (),
        (_GEN_GPST + "test_generation_options_survive_saving",),
        (_GEN_RNNG + "test_generation_options_survive_saving",),
        ("no: there are no options besides those of transformers",),
    ),
    Row(
        "options of generate",
        (),
        (_GEN_GPST + "test_stock_options_apply", _GEN_GPST + "test_stop_strings"),
        (_GEN_RNNG + "test_stock_options_apply", _GEN_RNNG + "test_stop_strings"),
        (_GEN + "test_stock_options_apply", _GEN + "test_streamers_and_stop_strings"),
    ),
    Row(
        "a misspelt option is an error",
        (),
        (_GEN_GPST + "test_unsupported_options_are_refused",),
        (_GEN_RNNG + "test_unsupported_options_are_refused",),
        (_GEN + "test_unknown_options_are_errors",),
    ),
    Row(
        "types and shapes of what is generated",
        (),
        (_GEN_GPST + "test_output_types",),
        (_GEN_RNNG + "test_output_types",),
        (_GEN + "test_trees_are_those_of_parse",),
    ),
    Row(
        "trees match words",
        (),
        (_GEN_GPST + "test_scores_are_joint_given_the_prompt",),
        (_GEN_RNNG + "test_every_sequence_has_its_tree",),
        (_GEN + "test_trees_are_those_of_parse",),
    ),
    Row(
        "scores of the search are right",
        (),
        (_GEN_GPST + "test_scores_are_joint_given_the_prompt",),
        (_GEN_RNNG + "test_scores_are_joint_given_the_prompt",),
        (_GEN + "test_scores_are_log_probabilities",),
    ),
    Row(
        "the search is right",
        (),
        (_GEN_GPST + "test_wide_beam_finds_the_best_words", _SEARCH_GPST + "test_wide_beam_is_exact"),
        (_GEN_RNNG + "test_wide_beam_finds_the_best_sentences", _SEARCH_RNNG + "test_full_beams_are_exact"),
        (_STOCK,),
    ),
    Row(
        "wide beams are no worse: full ones are exact",
        (),
        (_SEARCH_GPST + "test_wide_beam_is_exact",),
        (_SEARCH_RNNG + "test_full_beams_are_exact_for_three_words",),
        (_STOCK,),
    ),
    Row(
        "sampling is right and repeats under a seed",
        (),
        (_GEN_GPST + "test_sampling_follows_the_exact_marginal", _GEN_GPST + "test_sampling_repeats_under_a_seed"),
        (_GEN_RNNG + "test_sampling_follows_the_exact_marginal", _GEN_RNNG + "test_sampling_repeats_under_a_seed"),
        (_STOCK,),
    ),
    Row(
        "batches generate what single prompts do",
        (),
        (_GEN_GPST + "test_batch_equals_one_by_one",),
        (_GEN_RNNG + "test_batch_equals_one_by_one",),
        (_GEN + "test_cache_and_batches_change_nothing",),
    ),
    Row(
        "padding changes nothing",
        (_LAYERS + "test_padding_changes_no_hidden_state",),
        (_GPST + "test_padding_and_batching_change_nothing", _SEARCH_GPST + "test_batch_equals_one_by_one"),
        (_RNNG + "test_padding_and_batching_change_nothing", _SEARCH_RNNG + "test_batch_equals_one_by_one"),
        (_RECURRENT + "test_padding_and_batching_change_nothing",),
    ),
    Row(
        "the cache changes nothing",
        (),
        (_SEARCH_GPST + "test_split_prefix_equals_full",),
        (_SEARCH_RNNG + "test_split_prefix_equals_full",),
        (_RECURRENT + "TestCache::test_two_calls_are_one",),
    ),
    Row(
        "rows of the cache can be chosen",
        (),
        (_SEARCH_GPST + "test_cache_rows_can_be_reordered_repeated_and_copied",),
        (_SEARCH_RNNG + "test_cache_rows_can_be_reordered_repeated_and_copied",),
        (_RECURRENT + "TestCache::test_rows_are_selected_and_repeated",),
    ),
    Row(
        "logits are a distribution, and causal",
        (),
        (_SEARCH_GPST + "test_logits_are_causal_distributions",),
        (_RNNG + "test_logits_are_normalized_and_causal",),
        (
            _RECURRENT + "test_logits_are_log_probabilities",
            _RECURRENT + "test_later_tokens_and_other_rows_change_nothing",
        ),
    ),
    Row(
        "streaming",
        (),
        (_GEN_GPST + "test_text_streamer_with_a_tokenizer", _GEN_GPST + "test_streamer_gets_prompt_and_words"),
        (_GEN_RNNG + "test_streamer_gets_prompt_and_words",),
        (_GEN + "test_streamers_and_stop_strings",),
    ),
    Row(
        "stopping criteria and processors",
        (),
        (_GEN_GPST + "test_stopping_criteria", _GEN_GPST + "test_processors_see_words_of_every_hypothesis"),
        (_GEN_RNNG + "test_stopping_criteria", _GEN_RNNG + "test_processors_see_words_of_every_hypothesis"),
        (_GEN + "test_sequences_that_a_criterion_ends",),
    ),
    Row(
        "pipelines",
        (),
        (_ECO + "test_text_generation_pipeline", _ECO + "test_text_classification_pipeline"),
        (_ECO + "test_text_generation_pipeline_of_rnng",),
        (_RECURRENT + "test_pipeline_and_trainer",),
    ),
    Row(
        "tokenizers fit their models",
        (_HUB + "TestExport::test_tokenizer_that_does_not_fit_is_an_error",),
    ),
    Row(
        "empty, short and long texts",
        (),
        (
            _SEARCH_GPST + "test_one_word_and_empty_texts",
            _GPST + "test_whole_context_fits_the_positions",
            _GEN_GPST + "test_prompt_of_a_begin_token_or_nothing",
        ),
        (_GEN_RNNG + "test_nothing_as_prompt", _SEARCH_RNNG + "test_long_sentences", _RNNG + "test_bad_input_is_named"),
        (
            _GEN + "test_from_the_beginning",
            _GEN + "test_sentence_without_words",
            _RECURRENT + "test_bad_input_is_named",
        ),
    ),
    Row(
        "labels: what is left out, and shifted ones",
        ("transformers:test_causal_lm_loss_honors_shift_labels",),
        (_GPST + "test_labels_mask_the_token_loss_only", _GPST + "test_shifted_labels"),
        (_RNNG + "test_labels_mask_the_word_loss_only",),
        (_RECURRENT + "test_labels_choose_what_counts",),
    ),
    Row("accumulated gradients", ("test_loss_shares::test_pieces_add_up_to_the_whole_batch",)),
    Row(
        "gradient checkpointing",
        (),
        (
            "transformers:test_training_gradient_checkpointing",
            _GPST + "test_gradient_checkpointing_gives_the_same_gradients",
        ),
        (_LAYERS + "test_gradient_checkpointing_is_for_transformer_layers",),
        (_LAYERS + "test_gradient_checkpointing_is_for_transformer_layers",),
    ),
    Row(
        "all parameters are trained",
        ("transformers:test_training",),
        (_GPST + "test_all_parts_get_gradients_in_one_call",),
        (_RNNG + "test_every_parameter_gets_a_gradient",),
        (_RECURRENT + "test_every_parameter_learns",),
    ),
    Row(
        "Trainer",
        (),
        (_ECO + "test_trainer_trains", _ECO + "test_trainer_predicts_with_metrics"),
        (_RNNG + "test_trainer_trains_on_trees", _RNNG + "test_trainer_evaluates_what_the_collator_makes"),
        (_RECURRENT + "test_pipeline_and_trainer",),
    ),
    Row("exact resume", ("test_training_two_processes::test_killed_run_resumes_bit_equal",)),
    Row("two processes train like one", ("test_distributed::test_two_processes_equal_one",)),
    Row(
        "implementations of attention",
        ("transformers:test_eager_matches_sdpa_inference",),
        (
            _LAYERS + "test_gpst_attention_implementations_agree_in_the_search",
            _SEARCH_GPST + "test_eager_attention_equals_sdpa",
        ),
    ),
    Row(
        "hidden states and attentions",
        (
            "transformers:test_hidden_states_output",
            "transformers:test_attention_outputs",
            _LAYERS + "test_embeddings_come_first_and_the_output_last",
            _LAYERS + "test_attention_weights_or_an_error",
        ),
    ),
    Row("tuples and dictionaries", (_LAYERS + "test_tuples_hold_what_dictionaries_hold",)),
    Row(
        "inputs_embeds, or an error",
        ("transformers:test_inputs_embeds", _LAYERS + "test_vectors_instead_of_ids_are_errors"),
    ),
    Row("evaluation is deterministic", ("transformers:test_determinism",)),
    Row(
        "compiled and exported models",
        (
            _COMPILE + "test_compiled_scores_are_the_same",
            _COMPILE + "test_one_graph_is_refused_by_torch",
            "no: not in one graph, as searches, charts and recurrences run outside of compiled graphs; torch says so",
        ),
        (
            _GPST + "test_compiled_training_keeps_the_stopped_gradient",
            _COMPILE + "test_layers_of_gpst_are_one_graph_of_any_length",
            _COMPILE + "test_a_search_cannot_be_exported",
        ),
        (_RNNG + "test_compiled_training_is_the_same", _COMPILE + "test_a_search_cannot_be_exported"),
        (
            _RECURRENT + "test_compiled_model_gives_the_same_numbers",
            _COMPILE + "test_recurrent_models_are_exported_for_one_shape",
        ),
    ),
    Row(
        "adapters (PEFT)",
        (
            "test_peft::test_lora_trains_saves_loads_and_merges",
            "test_peft::test_no_adapter_is_without_effect",
            "test_peft::test_what_is_no_sum_of_weights_is_refused",
        ),
    ),
    Row(
        "lm-eval, minicons and surprisal agree with the own scores",
        (_ECO + "test_the_package_surprisal_reads_the_own_logits",),
        (_ECO + "test_lm_eval_agrees_with_parse", _ECO + "test_minicons_agrees_with_parse"),
        (_ECO + "test_lm_eval_agrees_with_parse_of_rnng", _ECO + "test_minicons_agrees_with_parse_of_rnng"),
        (
            _RECURRENT + "test_lm_eval_gives_the_own_log_probabilities",
            _RECURRENT + "test_minicons_gives_the_own_log_probabilities",
        ),
    ),
    Row(
        "no leakage: what comes later changes no probability",
        (),
        (_SEARCH_GPST + "test_logits_are_causal_distributions",),
        (_SEARCH_RNNG + "test_logits_are_causal_and_stepwise",),
        (_RECURRENT + "test_later_tokens_and_other_rows_change_nothing",),
    ),
    Row(
        "what is not supported says so",
        (_LAYERS + "test_unknown_arguments_are_errors", "test_device_map::test_offloading_is_an_error"),
        (_GEN_GPST + "test_batch_generation_is_refused", _LAYERS + "test_a_search_has_no_states_of_layers"),
        (_GEN_RNNG + "test_unsupported_options_are_refused", _LAYERS + "test_a_search_has_no_states_of_layers"),
        (_GEN + "test_options_without_effect_are_errors",),
    ),
    Row(
        "model cards",
        (_HUB + "TestCard::test_front_matter", _HUB + "TestCard::test_every_place_is_filled"),
        (_HUB + "TestCard::test_a_number_needs_its_beam",),
        (),
        (_HUB + "test_recurrent_models",),
    ),
    Row(
        "typed and documented interface",
        (
            "test_public_api::test_public_functions_are_annotated",
            "test_docstrings::test_public_names_are_documented",
            _HUB + "TestCard::test_card_snippet_runs",
        ),
    ),
)


@functools.cache
def names_of(module: str) -> set[str]:
    """Tests of a module as `name` and `Class::name`."""
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@functools.cache
def upstream_source() -> str:
    """transformers' tests of models."""
    assert transformers_tests.missing() is None, transformers_tests.missing()
    return (transformers_tests.folder() / "test_modeling_common.py").read_text(encoding="utf-8")


def is_run(test: str, architecture: str) -> bool:
    """Whether a test of a cell exists and runs for an architecture; one that does not exist fails.

    One of transformers that is left out has its reason in `transformers_skips`.
    """
    if test.startswith(TRANSFORMERS):
        name = test.removeprefix(TRANSFORMERS)
        assert f"def {name}(" in upstream_source(), f"transformers has no {name}"
        skip = skip_of(architecture, name)
        return skip is None or bool(skip.classes)
    module, _, name = test.partition("::")
    assert name in names_of(module), f"there is no {test}"
    return True


def test_there_are_all_rows() -> None:
    assert len(ROWS) == 56 and len({row.expectation for row in ROWS}) == 56


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.expectation)
def test_every_cell_is_filled(row: Row, architecture: str) -> None:
    cell = row.cell(architecture)
    assert cell, "name a test, or say why there is none"
    for entry in cell:
        if entry.startswith(NO):
            assert len(entry) > len(NO) + 20, "give a reason"
        else:
            is_run(entry, architecture)
