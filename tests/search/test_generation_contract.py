"""What transformers demands of every model that generates, for all architectures and the LSTM.

transformers' own tests of generation are not in its source distribution; these ask for the same: modes, types and
shapes of outputs, caches, prompts of all kinds, and errors for what a model cannot do.
"""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from tests.helpers.architectures import ARCHITECTURES, build
from tests.helpers.garbage import tensors_in_cycles
from tests.helpers.refusals import raised, refused

SEARCHING = ("gpst", "rnng", "tree_lm", "urnng", "pushdown")
NEW, PROMPT, VOCABULARY = 4, 3, range(5, 19)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beam": {"num_beams": 3},
    "several of a beam": {"num_beams": 3, "num_return_sequences": 2},
    "beam sample": {"do_sample": True, "num_beams": 3},
}


@pytest.fixture(params=ARCHITECTURES)
def model(request: Any) -> Any:
    """A small language model of each architecture."""
    return build(request.param)


def prompts() -> torch.Tensor:
    """Two prompts."""
    torch.manual_seed(0)
    return torch.randint(VOCABULARY.start, VOCABULARY.stop, (2, PROMPT))


def generate(model: Any, ids: torch.Tensor | None, seed: int = 0, **options: Any) -> Any:
    """Generate a fixed number of tokens."""
    torch.manual_seed(seed)
    return model.generate(ids, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, **options})


def stock(model: Any) -> dict[str, Any]:
    """Options that leave generation to transformers' own loop."""
    return {"structure_mode": "marginal"} if hasattr(model, "word_search") else {}


@pytest.mark.parametrize("mode", MODES)
def test_sequences_begin_with_their_prompts_and_repeat(model, mode):
    ids, options = prompts(), MODES[mode]
    written = generate(model, ids, **options)
    copies = options.get("num_return_sequences", 1)
    assert written.shape == (2 * copies, PROMPT + NEW)
    assert torch.equal(written[:, :PROMPT], ids.repeat_interleave(copies, 0))
    assert torch.equal(written, generate(model, ids, **options))
    assert torch.equal(written, generate(model, ids, **options, return_dict_in_generate=True).sequences)


@pytest.mark.parametrize(("mode", "use_cache"), [*((mode, True) for mode in MODES), ("greedy", False), ("beam", False)])
def test_outputs(model, mode, use_cache):
    """For models with a search, this is the stock loop over next-token distributions."""
    options = {**MODES[mode], **stock(model)}
    output = generate(
        model, prompts(), **options, use_cache=use_cache, return_dict_in_generate=True, output_scores=True,
        output_logits=True,
    )  # fmt: skip
    beams = options.get("num_beams", 1)
    assert isinstance(output, GenerateDecoderOnlyOutput if beams == 1 else GenerateBeamDecoderOnlyOutput)
    assert len(output.scores) == len(output.logits) == NEW
    rows = 2 * (beams if beams > 1 else options.get("num_return_sequences", 1))
    for scores in output.scores:
        assert scores.shape == (rows, model.config.vocab_size) and not torch.isnan(scores).any()
    if beams > 1:
        assert output.sequences_scores.shape == (2 * options.get("num_return_sequences", 1),)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_the_search(mode):
    for model in (build(name) for name in SEARCHING):
        options = MODES[mode]
        output = generate(model, prompts(), **options, return_dict_in_generate=True, output_scores=True)
        copies = 2 * options.get("num_return_sequences", 1)
        kind = GenerateBeamDecoderOnlyOutput if "num_beams" in options else GenerateDecoderOnlyOutput
        assert isinstance(output, kind) and len(output.spans) == len(output.sequences) == copies
        assert len(output.scores) == NEW
        assert all(s.shape[1] == model.config.vocab_size and not torch.isnan(s).any() for s in output.scores)
        for bad in ({"use_cache": False}, {"output_logits": True}):
            with pytest.raises(ValueError, match="structure_mode='marginal'"):
                generate(model, prompts(), **options, **bad, return_dict_in_generate=True)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_transition_scores(model, num_beams):
    """They add up to `sequences_scores`; a joint beam, whose words share their score with the tree, refuses."""
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "length_penalty": 0.0}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    output = generate(model, prompts(), **options, **stock(model))
    found = model.compute_transition_scores(output.sequences, output.scores, output.get("beam_indices"))
    assert found.shape == (2 * num_beams, NEW)
    if num_beams > 1:
        torch.testing.assert_close(found.sum(1), output.sequences_scores)
    if not hasattr(model, "word_search"):
        return
    output = generate(model, prompts(), **options)
    if num_beams > 1:
        with pytest.raises(ValueError, match="sequences_scores.*structure_mode='marginal'"):
            model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    else:
        found = model.compute_transition_scores(output.sequences, output.scores)
        steps = [step.gather(1, output.sequences[:, PROMPT + t, None]) for t, step in enumerate(output.scores)]
        assert torch.equal(found, torch.cat(steps, 1))


@pytest.mark.parametrize("mode", ["greedy", "several of a beam"])
@pytest.mark.parametrize("architecture", ARCHITECTURES[:-1])
def test_spans_are_columns_of_the_sequences(architecture, mode):
    """Also behind padding; `brackets` writes the tree from the tokenizer or from one string per column."""
    model, ids = build(architecture), prompts()
    mask = torch.ones_like(ids)
    ids[0, 0] = mask[0, 0] = 0
    output = generate(model, ids, attention_mask=mask, return_dict_in_generate=True, **MODES[mode])
    columns = [f"w{column}" for column in range(output.sequences.shape[1])]
    for row, spans in enumerate(output.spans):
        first, last = output.offsets[row], output.offsets[row] + output.lengths[row]
        assert first == int(row < len(output.spans) // 2) and PROMPT < last <= len(columns)
        assert max(spans, key=lambda span: span[1] - span[0]) == (first, last)
        written = output.brackets(columns, row)
        assert [word for word in re.findall(r"[^() ]+", written) if word in columns] == columns[first:last]
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"t{int(i)}" for i in ids])
    assert f"t{int(output.sequences[1, PROMPT])}" in output.brackets(tokenizer, 1)
    parsed = model.parse(ids, attention_mask=mask)
    tokens = re.findall(r"t\d+", parsed.brackets(tokenizer, 0))
    assert tokens == [f"t{int(i)}" for i in ids[0, 1:]]
    refused(r"1 words were given. Pass one word per token, or .*parse_sentences", parsed.brackets, ["a"], 1)
    refused("one word per column", output.brackets, ["a"], 1)
    refused("Sequence 9 has no tree", output.brackets, columns, 9)
    with pytest.raises(ValueError, match="Pad only on the left|holes or padding|holes inside"):
        generate(model, ids.flip(1), attention_mask=mask.flip(1), return_dict_in_generate=True)


def test_the_cache_changes_nothing(model):
    for options in ({}, {"num_beams": 3}):
        with_cache = generate(model, prompts(), **options, **stock(model), use_cache=True)
        assert torch.equal(with_cache, generate(model, prompts(), **options, **stock(model), use_cache=False))


def test_without_a_prompt(model):
    begin = model.config.bos_token_id or 1
    written = generate(model, None, bos_token_id=begin)
    assert torch.equal(written, generate(model, torch.tensor([[begin]]), bos_token_id=begin))


def test_left_padding(model):
    ids = prompts()
    padded = torch.cat([torch.full((2, 2), model.config.pad_token_id or 0), ids], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        written = generate(model, padded, attention_mask=mask, **options)[:, PROMPT + 2 :]
        alone = [generate(model, row, **options)[:, row.shape[1] :] for row in (ids[:1], ids[1:, -1:])]
        assert torch.equal(written, torch.cat(alone))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_right_padding(model, options):
    """Words follow the text; not asked for trees, whose spans are columns."""
    ids, longer = prompts(), PROMPT + 2
    padded = torch.cat([ids, torch.full((2, 2), model.config.pad_token_id or 0)], 1)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    for mode in [stock(model)] if "use_cache" in options else [{}, stock(model)]:
        written = generate(model, padded, attention_mask=mask, **options, **mode)[:, longer:]
        alone = [generate(model, row, **options, **mode)[:, row.shape[1] :] for row in (ids[:1], ids[1:, :1])]
        assert torch.equal(written, torch.cat(alone))


@pytest.mark.parametrize("mode", ["joint", "marginal"])
def test_other_end_tokens_stop_samples(model, mode):
    options = {"min_new_tokens": None, "do_sample": True, **({"structure_mode": mode} if stock(model) else {})}
    for seed in range(4):
        text = generate(model, prompts()[:1], seed, **options)[0].tolist()
        ends = [model.config.eos_token_id, *text[PROMPT + 1 : PROMPT + 2]]
        found = generate(model, prompts()[:1], seed, **options, eos_token_id=ends)[0].tolist()
        stop = next((place + 1 for place in range(PROMPT, len(text)) if text[place] in ends), len(text))
        assert found == text[:stop]


@pytest.mark.parametrize("mode", ["joint", "marginal"])
def test_other_end_tokens_only_stop(model, mode):
    """Every word of a default continuation as an end token: the text is the default, cut there."""
    searches, own = hasattr(model, "word_search"), model.config.eos_token_id
    common: dict[str, Any] = {"min_new_tokens": None, "max_new_tokens": 7}
    common |= {"structure_mode": mode} if searches else {}
    texts = generate(model, prompts(), **common)[:, PROMPT:].tolist()
    for row, text in enumerate(texts):
        for word in dict.fromkeys(text):
            if word in (own, 0):
                continue
            place = text.index(word)
            cut = text[: place + 1]
            more: list[dict[str, Any]] = [{}, {"min_new_tokens": place or None}]
            more += [{"max_new_tokens": place + 1, "forced_eos_token_id": word}]
            for ends in ([own, word], word) if searches else ([own, word],):
                for options in more:
                    found = generate(model, prompts()[row, None], **{**common, "eos_token_id": ends, **options})
                    assert found[0, PROMPT:].tolist() == cut


NOT_SUPPORTED = [
    ({"prompt_lookup_num_tokens": 2}, "Use greedy search"),
    ({"assistant_model": "itself"}, "Use greedy search"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "Use greedy search"),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "Use greedy search"),
    ({"not_an_option": 1}, "not_an_option"),
]


@pytest.mark.parametrize(("options", "message"), NOT_SUPPORTED, ids=str)
def test_what_is_not_supported_is_an_error(model, options, message):
    options = dict(options)
    if "assistant_model" in options:
        options["assistant_model"] = model
    refused(message, generate, model, prompts()[:1], **options)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "pcfg"])
def test_joint_is_a_mode_of_all(name):
    """A PCFG draws whole sentences by it; where the words determine the tree it is what happens anyway."""
    model = build(name)
    assert torch.equal(generate(model, prompts(), structure_mode="joint"), generate(model, prompts()))


@pytest.mark.parametrize("name", ["urnng", "pushdown"])
def test_padding_and_begin_token_are_no_words(name):
    """No mode draws them."""
    model = build(name, vocab_size=11, bos_token_id=1, eos_token_id=2)
    model.lm_head.bias.data[:2] = 4.0
    for options in ({}, {"structure_mode": "marginal"}, {"do_sample": False, "num_beams": 3}):
        options = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": None, **options}
        drawn = model.generate(torch.tensor([[3]] * 20), **options)
        words = drawn[(drawn == model.config.eos_token_id).cumsum(1) == 0]
        assert len(words) > 20 and words.min() > 1


def test_batching_of_its_own_is_an_error(model):
    for batched in (model.generate_batch, model.init_continuous_batching):
        raised(NotImplementedError, "padded batch", batched, [[5]])


def test_embeddings_as_prompts_are_an_error(model):
    with pytest.raises((TypeError, ValueError), match="inputs_embeds"):  # of recurrent models, trees need the ids
        generate(model, None, inputs_embeds=torch.zeros(1, 2, 8), return_dict_in_generate=True)


def test_searches_leave_no_tensors_to_the_garbage_collector(model):
    assert not tensors_in_cycles(lambda: getattr(model, "parse", model.generate)(prompts()))
