"""What GPST and RNNG, the models with a search, promise alike: parsing, logits, caches, generation.

Values are compared with enumerations and the authors' beams in `test_synchronous`, `test_rnng_fast_track`,
`test_generation_gpst` and `test_generation_rnng`.
"""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from hf_synlm.search.state import SyntacticCache
from tests.helpers.refusals import refused
from tests.helpers.search_models import (
    actions_of,
    assert_fits,
    count_words,
    ending_model,
    generate,
    padded,
    parse,
    search_model,
)

GENERATING = ("gpst", "rnng", "rnng, in-order")
every_system = pytest.mark.parametrize("name", GENERATING)
# GPST also searches action by action, without the marginal mode.
every_search = pytest.mark.parametrize(
    ("name", "search"), [*((name, {}) for name in GENERATING), ("gpst", {"synchronous": False})]
)
MODES: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 3}]
every_mode = pytest.mark.parametrize("mode", MODES)


# ------------------------------------------------------------------------------------------ batches, prefixes, caches
@every_system
def test_logits_are_stepwise(name: str) -> None:
    """`stepwise_log_probs` are the logits at the observed tokens, also after a begin token."""
    model = search_model(name)
    ids = torch.randint(5, 12, (2, 8))
    logits = model(ids).logits
    stepwise = parse(model, ids, model.config.scoring_num_beams, stepwise=True).stepwise_log_probs
    torch.testing.assert_close(stepwise[:, 1:], logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2))
    begun = torch.cat([torch.full_like(ids[:, :1], model.config.bos_token_id), ids], 1)
    with_begin = model(begun, attention_mask=torch.ones_like(begun)).logits
    torch.testing.assert_close(with_begin[:, 1:], logits)
    torch.testing.assert_close(with_begin[:, 0].gather(1, ids[:, :1]).squeeze(1), stepwise[:, 0])
    if name != "gpst":
        assert (logits[..., 0] == -math.inf).all()  # padding is never a word


@every_system
def test_word_ends_continue_across_caches(name: str) -> None:
    """Word edges of a text in two parts equal those of the whole, with and without a begin token."""
    model = search_model(name)
    ids = torch.tensor([[model.config.bos_token_id, 9, 8, 9, 10, 5, 8], [7, 9, 8, 9, 10, 5, 8]])
    ends = torch.tensor([[True, False, True, True, False, False, True], [True, True, False, False, True, True, True]])
    mask = torch.ones_like(ids)
    full = model(ids, attention_mask=mask, word_ends=ends).logits
    first = model(ids[:, :4], attention_mask=mask[:, :4], word_ends=ends[:, :4], use_cache=True)
    cache = first.past_key_values
    second = model(ids[:, 4:], attention_mask=mask, word_ends=ends[:, 4:], past_key_values=cache)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full, atol=1e-4, rtol=0)
    assert not torch.allclose(model(ids, attention_mask=mask).logits, full, atol=1e-3)


@every_system
def test_ids_and_shapes_are_checked_at_every_entrance(name: str) -> None:
    """Logits, parsing and generation."""
    model, ids = search_model(name), torch.tensor([[9, 8, 10]])
    for enter in (model, model.parse, lambda ids, **options: model.generate(ids, max_new_tokens=2, **options)):
        for wrong in (model.config.vocab_size, -1):
            with pytest.raises(ValueError, match=f"Token id {wrong}"):
                enter(torch.tensor([[9, wrong]]), attention_mask=torch.ones(1, 2, dtype=torch.long))
        for shape in ((1, 2), (2, 3)):
            refused("attention_mask .*shape", enter, ids, attention_mask=torch.ones(shape, dtype=torch.long))
    for enter in (model, model.parse):
        refused("word_ends has shape", enter, ids, word_ends=torch.ones(1, 2, dtype=torch.bool))
    for number in (0, 2.0, True, "2"):
        refused(f"num_beams={number!r}", model.parse, ids, num_beams=number)
    for options, message in (
        ({"num_beams": 3, "num_return_sequences": 4}, "num_return_sequences=4"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "holes"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "no token"),
    ):
        refused(message, model.parse, ids, **options)
    refused("logits_to_keep=-1", model, ids, logits_to_keep=-1)
    cache = model(ids, use_cache=True).past_key_values
    refused("1 sentences, but input_ids has 2 rows", model, ids.expand(2, -1), past_key_values=cache)


# --------------------------------------------------------------------------------------------------------- generation
@pytest.mark.parametrize(
    ("name", "search"),
    [
        *((name, {"structure_mode": mode}) for name in GENERATING for mode in ("joint", "marginal")),
        ("gpst", {"synchronous": False}),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}])
def test_generated_batch_equals_one_by_one(name: str, search: dict, options: dict) -> None:
    """Left-padded prompts of unequal lengths, with end tokens, equal single prompts."""
    model, rows = ending_model(name), [[9, 11, 10, 8], [7], [10, 5, 9]]
    eos = model.config.eos_token_id
    ids, mask = padded(rows, left=True)
    count = options.get("num_return_sequences", 1)
    common = {"eos_token_id": eos, "max_new_tokens": 6, **search, **options}
    output = generate(model, ids, attention_mask=mask, **common)
    for row, prompt in enumerate(rows):
        single = generate(model, [prompt], **common)
        for rank in range(count):
            index, shift = row * count + rank, ids.shape[1] - len(prompt)
            new, expected = output.sequences[index, 4:].tolist(), single.sequences[rank, len(prompt) :].tolist()
            # The stock beam search pads with the end token where the padding id is 0.
            assert new[: len(expected)] == expected and set(new[len(expected) :]) <= {0, eos}
            if search.get("structure_mode") != "marginal":
                assert actions_of(output, index) == actions_of(single, rank)
                assert output.spans[index] == [(i + shift, j + shift) for i, j in single.spans[rank]]
                assert output.labels is None or output.labels[index] == single.labels[rank]
                torch.testing.assert_close(output.sequences_scores[index], single.sequences_scores[rank])


@every_search
def test_early_stopping_and_length_penalty(name: str, search: dict) -> None:
    """`early_stopping` stops at K finished sequences, "never" finds no worse ones; long texts can be favored."""
    model = ending_model(name)
    common = {"eos_token_id": model.config.eos_token_id, "num_beams": 3, "num_return_sequences": 3}
    common |= {"max_new_tokens": 10, **search}
    first, few, never = (
        generate(model, [[9, 11]], early_stopping=stop, length_penalty=0.0, **common).sequences_scores
        for stop in (True, False, "never")
    )
    assert (never >= first - 1e-5).all() and (few >= first - 1e-5).all()
    short = generate(model, [[9, 11]], length_penalty=-5.0, **common)
    long = generate(model, [[9, 11]], length_penalty=5.0, early_stopping="never", **common)
    assert count_words(short, 0) <= count_words(long, 0)


@every_system
def test_beam_sampling_draws_from_the_beam(name: str) -> None:
    """With num_beams=K, first words come in proportion to the K best candidates."""
    model = search_model(name)
    search = model.word_search(4)
    with torch.no_grad():
        chosen, _, _ = search.propose_tokens(search.begin(1, torch.device("cpu")), None)
    prompts, size = torch.full((1500, 1), model.config.bos_token_id), model.config.vocab_size
    output = generate(model, prompts, do_sample=True, top_k=0, num_beams=4, max_new_tokens=1)
    counts = torch.bincount(output.sequences[:, -1], minlength=size)
    expected = torch.zeros(size).scatter_add(0, chosen.tokens[0], chosen.scores[0].softmax(0))
    assert counts[expected == 0].sum() == 0
    assert_fits(counts[expected > 0], expected[expected > 0])


@every_system
@every_mode
def test_processors_see_words_of_every_hypothesis(name: str, mode: dict) -> None:
    """One row of words per hypothesis, and what they forbid is not generated; also where texts may end."""
    model, ids = search_model(name), [[9, 11], [8, 10]]
    for end in ({}, {"eos_token_id": model.config.eos_token_id, "min_new_tokens": 5}):
        forbidden, shapes = generate(model, ids, **mode, **end).sequences[0, 2], []

        def forbid(ids: Tensor, scores: Tensor, seen: list = shapes, word: Tensor = forbidden) -> Tensor:
            seen.append((tuple(ids.shape), tuple(scores.shape)))
            return scores.index_fill(1, word, -math.inf)

        output = generate(model, ids, logits_processor=transformers.LogitsProcessorList([forbid]), **mode, **end)
        assert not (output.sequences[:, 2:] == forbidden).any()
        rows = 2 * mode.get("num_beams", 1)
        assert {read for read, _ in shapes} == {(rows, length) for length in range(2, 7)}
        assert {scored for _, scored in shapes} == {(rows, model.config.vocab_size)}


@every_search
@every_mode
def test_stock_options_apply(name: str, search: dict, mode: dict) -> None:
    """n-gram blocking, bad words, allowed words per prompt, and scores of every word."""
    model, ids = search_model(name), [[9, 11], [8, 10]]
    options = {**mode, **search}
    # RNNG has 11 words; trees of more than 7 new ones could not be finished.
    output = generate(model, ids, no_repeat_ngram_size=1, max_new_tokens=7, **options)
    assert all(len(set(row)) == len(row) for row in output.sequences.tolist())
    banned = generate(model, ids, **options).sequences[0, 2].item()
    assert banned not in generate(model, ids, bad_words_ids=[[banned]], **options).sequences[:, 2:]
    prompts = [[9, 11, 10, 8], [8, 10, 5, 6]]  # with more derivations than the beam holds
    allowed = generate(model, prompts, prefix_allowed_tokens_fn=lambda row, _: [4 + row, 7 + row], **options)
    assert set(allowed.sequences[0, 4:].tolist()) <= {4, 7} and set(allowed.sequences[1, 4:].tolist()) <= {5, 8}
    if not search and "do_sample" not in mode:
        scores = generate(model, ids, output_scores=True, **mode).scores
        rows = 2 * mode.get("num_beams", 1)
        assert len(scores) == 5 and all(step.shape == (rows, model.config.vocab_size) for step in scores)


@every_search
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}])
def test_stopping_criteria(name: str, search: dict, mode: dict) -> None:
    """A row stops at its word, its tree is closed, and the rest is padding."""
    model, options = search_model(name), {"max_new_tokens": 8, **mode, **search}
    torch.manual_seed(0)
    word = int(generate(model, [[9, 11]], **options).sequences[0, 4])
    criteria = transformers.StoppingCriteriaList([lambda ids, *_, **__: ids[:, -1] == word])
    torch.manual_seed(0)
    output = generate(model, [[9, 11], [8, 10]], stopping_criteria=criteria, pad_token_id=0, **options)
    for row, sequence in enumerate(output.sequences.tolist()):
        new = sequence[2:]
        length = new.index(word) + 1 if word in new else len(new)
        assert set(new[length:]) <= {0}
        assert count_words(output, row) == 2 + length
        assert (0, 2 + length) in output.spans[row]


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"structure_mode": "marginal"}, {"synchronous": False}])
@every_system
def test_streamer_gets_prompt_and_words(name: str, options: dict) -> None:
    """First the prompt, then word by word, then the end; with beams it is refused as in transformers."""
    if "synchronous" in options and name != "gpst":
        options = {"do_sample": True, "structure_mode": "marginal"}
    model, streamer = ending_model(name), mock.Mock()
    common = {"eos_token_id": model.config.eos_token_id, "max_new_tokens": 7}
    output = generate(model, [[9, 11], [8, 10]], streamer=streamer, **common, **options)
    first, *words = (call.args[0] for call in streamer.put.call_args_list)
    assert first.tolist() == [[9, 11], [8, 10]] and torch.equal(torch.stack(words, 1), output.sequences[:, 2:])
    streamer.end.assert_called_once_with()
    refused("streamer", generate, model, [[9]], streamer=streamer, num_beams=2)


@every_system
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"structure_mode": "marginal"}])
def test_stop_strings(name: str, options: dict) -> None:
    """Stop strings work with the stock criterion, which wants a tokenizer."""
    model = search_model(name)
    plain = generate(model, [[9, 11]], **options).sequences[0].tolist()
    letters = "abcdefghijklmnopqrstuvwxyz0123456789ABCD"[: model.config.vocab_size]
    pieces = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    pieces.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces)
    output = generate(model, [[9, 11]], stop_strings=[letters[plain[3]]], tokenizer=tokenizer, **options)
    sequence = [token for token in output.sequences[0].tolist() if token]
    assert plain[3] not in sequence[2:-1]
    assert sequence[-1] == plain[3] or len(sequence) == 7


@every_search
@every_mode
def test_rows_without_words_keep_what_they_have(name: str, search: dict, mode: dict) -> None:
    """Where every word is forbidden the text stays as it is, and the other rows do not notice."""
    model, prompts = search_model(name), torch.tensor([[9, 11], [9, 5], [10, 8]])
    options = {**mode, **search}
    for last in (2, 4):

        def forbid(ids: Tensor, scores: Tensor, last: int = last) -> Tensor:
            return scores.masked_fill(((ids[:, 1] == 5) & (ids.shape[1] >= last))[:, None], -math.inf)

        output = generate(model, prompts, logits_processor=transformers.LogitsProcessorList([forbid]), **options)
        assert output.sequences.shape == (3, 7)
        assert output.sequences[1, :2].tolist() == [9, 5] and (output.sequences[1, last:] == 0).all()
        assert count_words(output, 1) == last
        assert torch.isfinite(output.sequences_scores).all()
        for row in (0, 2) if "do_sample" not in mode else ():
            single = generate(model, prompts[row : row + 1], **options)
            assert torch.equal(output.sequences[row], single.sequences[0])
            torch.testing.assert_close(output.sequences_scores[row], single.sequences_scores[0])


@every_search
@every_mode
def test_when_only_the_end_is_allowed(name: str, search: dict, mode: dict) -> None:
    """The end waits for one tree: derivations that may take it are drawn, others are not."""
    model = search_model(name)
    eos = model.config.eos_token_id
    forced = {"forced_eos_token_id": eos, "max_new_tokens": 3}
    for options in (forced, {"prefix_allowed_tokens_fn": lambda batch, ids: [eos]}):
        for seed in range(6 if "do_sample" in mode else 1):
            torch.manual_seed(seed)
            output = generate(model, [[9, 11, 10], [8, 9, 7]], eos_token_id=eos, **mode, **search, **options)
            assert torch.isfinite(output.sequences_scores).all()
            if options is not forced:
                assert (output.sequences[:, 3] == eos).all() and output.sequences.shape == (2, 4)
            for row in range(2):
                assert (0, count_words(output, row)) in output.spans[row]


@every_system
def test_missing_hypotheses_are_prompts(name: str) -> None:
    """Fewer sequences than asked for: the prompt stands in, with score -inf and no tree."""
    model = search_model(name)
    if name != "gpst":
        limits = {"max_open_nonterminals": 1, "max_consecutive_nonterminals": 1, "nonterminals": ["S"]}
        model = search_model("rnng, in-order", **limits)
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [7]}
    output = generate(model, [[9]], num_beams=4, num_return_sequences=4, max_new_tokens=1, **allowed)
    exists = torch.isfinite(output.sequences_scores)
    assert 0 < exists.sum() < 4 and (output.sequences[exists] == torch.tensor([9, 7])).all()
    assert (output.sequences_scores[~exists] == -math.inf).all()
    assert (output.sequences[~exists] == torch.tensor([9, 0])).all()
    for row in range(int(exists.sum()), 4):
        assert output.spans[row] == [] and actions_of(output, row) == ()


@every_system
def test_marginal_mode_is_stock_decoding_on_logits(name: str) -> None:
    """Greedy words are the best of the logits; beams score by their sum; from any cache the same; from nothing, too."""
    model = search_model(name)
    for start in ([9, 11, 10], [model.config.bos_token_id]):
        ids, count = torch.tensor([start]), len(start)
        output = generate(model, ids, structure_mode="marginal")
        logits = model(output.sequences).logits
        assert torch.equal(logits[:, count - 1 : -1].argmax(-1), output.sequences[:, count:])
        beams = generate(
            model, ids, structure_mode="marginal", num_beams=3, num_return_sequences=3, length_penalty=0.0,
            output_scores=True,
        )  # fmt: skip
        logits = model(beams.sequences).logits[:, count - 1 : -1]
        totals = logits.gather(2, beams.sequences[:, count:, None]).sum((1, 2))
        torch.testing.assert_close(totals, beams.sequences_scores, atol=1e-3, rtol=0)
    narrow = generate(model, ids, structure_mode="marginal", action_beam_size=4).past_key_values
    assert isinstance(narrow, SyntacticCache)
    assert (narrow.num_beams if name == "gpst" else narrow.options["action_beam_size"]) == 4


@every_system
@pytest.mark.parametrize("num_beams", [1, 2])
def test_marginal_mode_honours_its_options_without_and_with_a_cache(name: str, num_beams: int) -> None:
    """The width of the beam and the end token hold however the state is kept; GPST writes what `forward` says."""
    model = ending_model(name)
    eos, ids = model.config.eos_token_id, torch.tensor([[9, 11, 10, 8], [8, 5, 9, 7]])
    common = {"structure_mode": "marginal", "num_beams": num_beams, "output_scores": True, "eos_token_id": eos}
    for options in ({"action_beam_size": 3}, {"action_beam_size": 6}, {}):
        expected = generate(model, ids, **common, **options)
        uncached = generate(model, ids, use_cache=False, **common, **options)
        assert torch.equal(uncached.sequences, expected.sequences)
        torch.testing.assert_close(uncached.scores, expected.scores, atol=1e-4, rtol=0)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    assert cache.eos_token_ids is None
    cache.batch_repeat_interleave(num_beams)
    continued = generate(model, ids, past_key_values=cache, **common)
    assert torch.equal(continued.sequences, expected.sequences)
    assert name == "gpst" or cache.eos_token_ids.tolist() == [eos]
    torch.testing.assert_close(continued.scores, expected.scores, atol=1e-4, rtol=0)
    if name == "gpst" and num_beams == 1:
        logits = model(expected.sequences, attention_mask=torch.ones_like(expected.sequences)).logits
        torch.testing.assert_close(expected.scores[0], logits[:, ids.shape[1] - 1], atol=1e-4, rtol=0)
        assert (expected.scores[0][:, eos] > -torch.inf).all()


@every_system
@every_mode
def test_nothing_as_prompt(name: str, mode: dict) -> None:
    """No input at all, a begin token, and a row of padding beside others are the same."""
    model, results = search_model(name), []
    bos = model.config.bos_token_id
    model.generation_config.bos_token_id = bos
    for prompt in ({}, {"input_ids": torch.tensor([[bos]])}):
        torch.manual_seed(0)
        results.append(generate(model, None, **prompt, **mode) if not prompt else generate(model, [[bos]], **mode))
    assert torch.equal(results[0].sequences, results[1].sequences) and results[0].sequences[0, 0] == bos
    assert (1, 6) in results[0].spans[0]
    if "do_sample" not in mode:
        beside = generate(model, [[9, 10], [0, bos]], attention_mask=torch.tensor([[1, 1], [0, 1]]), **mode)
        assert torch.equal(beside.sequences[1, 2:], results[0].sequences[0, 1:])
        begun = generate(model, [[bos, 9]], **mode).sequences
        assert torch.equal(begun[:, 1:], generate(model, [[9]], **mode, return_dict_in_generate=False))


@every_system
def test_generation_options_survive_saving(name: str, tmp_path: Any) -> None:
    """Options of this library are saved, loaded, used, and can be overridden by a config or keywords."""
    model = search_model(name)
    model.set_generation_defaults()
    model.generation_config.update(structure_mode="marginal", action_beam_size=5)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.structure_mode == "marginal" and loaded.generation_config.action_beam_size == 5
    output = generate(loaded, [[9]])
    assert "spans" not in output
    cache = output.past_key_values
    assert (cache.num_beams if name == "gpst" else cache.options["action_beam_size"]) == 5
    assert generate(loaded, [[9]], structure_mode="joint").spans is not None
    config = transformers.GenerationConfig(
        max_new_tokens=2, structure_mode="joint", return_dict_in_generate=True, min_new_tokens=2
    )
    assert count_words(loaded.generate(torch.tensor([[9]]), config), 0) == 3


MARGINAL = {"structure_mode": "marginal"}
WORD_ENDS = {"word_ends": torch.tensor([[True, True]])}
CONTEXT = {"context_sentence_ids": torch.tensor([[0, 0]])}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("both", {"structure_mode": "tree"}, "structure_mode='tree'"),
    ("both", {"action_beam_size": 0}, "action_beam_size=0"),
    ("both", {"action_beam_size": 2.5}, "action_beam_size=2.5"),
    ("both", {"synced_gpus": True}, "synced_gpus"),
    ("both", {"past_key_values": SyntacticCache(2)}, "past_key_values"),
    ("both", {**CONTEXT, **MARGINAL}, "context_sentence_ids"),
    ("both", WORD_ENDS, "word_ends"),
    ("both", {**WORD_ENDS, **MARGINAL}, "word_ends"),
    ("both", {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])}, "SynthID"),
    ("both", {"action_beam_size": 3, "past_key_values": SyntacticCache(2), **MARGINAL}, "beam of 2|made with"),
    ("gpst", {"max_new_tokens": 100}, "Prompt and generated text.*max_new_tokens"),
    ("gpst", {"max_new_tokens": 100, **MARGINAL}, "Prompt and generated text.*max_new_tokens"),
    ("gpst", {"max_new_tokens": 100, "num_beams": 2, **MARGINAL}, "max_new_tokens"),
    ("gpst", {"max_new_tokens": 100, "synchronous": False}, "Prompt and generated text"),
    ("gpst", {"output_scores": True, "synchronous": False}, "output_scores"),
    ("rnng", {"action_beam_size": 2, "num_beams": 3}, "action_beam_size=2"),
    ("rnng", {"fast_track_size": -1}, "fast_track_size=-1"),
    ("rnng", {"fast_track_size": "a"}, "fast_track_size='a'"),
    ("rnng", CONTEXT, "context_sentence_ids"),
    ("rnng", {"actions": torch.tensor([[3, 1, 1, 2]])}, "actions"),
    ("rnng", {"exponential_decay_length_penalty": (1, 2.0), "eos_token_id": 0}, "exponential_decay.*marginal"),
]


@pytest.mark.parametrize(("which", "options", "message"), REFUSED)
def test_unsupported_options_are_refused(which: str, options: dict, message: str) -> None:
    for name in ("gpst", "rnng") if which == "both" else (which,):
        refused(message, generate, search_model(name), [[9, 11]], **options)
