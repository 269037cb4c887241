"""Tools that users bring: pipelines, lm-eval, minicons and surprisal see the numbers that `parse` gives."""

import copy
import importlib
from pathlib import Path

import pytest
import torch
from transformers import TextStreamer, pipeline

from hf_synlm import GPSTForCausalLM
from tests.helpers import recurrent_models
from tests.helpers.recurrent_models import ARCHITECTURES, BOUNDARY, make_model
from tests.helpers.scoring_models import SEARCHING, SENTENCES, model_and_tokenizer

CARDS = Path(__file__).parents[2] / "model_cards"


@pytest.fixture(scope="module", params=[*SEARCHING, "pcfg", "pcfg_simple", *ARCHITECTURES])
def scored(request):
    """A model, its tokenizer, sentences, and the log-probability of each sentence after the beginning."""
    if request.param in ARCHITECTURES:
        own, words = make_model(request.param), recurrent_models.words_tokenizer()
        rows = [torch.tensor([[BOUNDARY, *words(text)["input_ids"]]]) for text in recurrent_models.SENTENCES]
        totals = [own(ids, labels=ids).joint_log_prob.item() for ids in rows]
        return own, words, recurrent_models.SENTENCES, totals
    own, words = map(copy.deepcopy, model_and_tokenizer(request.param))
    rows = [torch.tensor([words(sentence)["input_ids"]]) for sentence in SENTENCES]
    if request.param.startswith("pcfg"):
        return own, words, SENTENCES, [own.parse(ids).token_log_probs.sum().item() for ids in rows]
    return own, words, SENTENCES, [own.parse(ids, stepwise=True).stepwise_log_probs.sum().item() for ids in rows]


def test_lm_eval_gives_the_own_log_probabilities(scored):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, sentences, totals = scored
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3)
    requests = [Instance("loglikelihood", {}, ("", sentence), x) for x, sentence in enumerate(sentences)]
    assert [score for score, _ in lm.loglikelihood(requests)] == pytest.approx(totals, abs=1e-3)
    rolling = [Instance("loglikelihood_rolling", {}, (sentence,), x) for x, sentence in enumerate(sentences)]
    one_by_one = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    assert one_by_one.loglikelihood_rolling(rolling) == pytest.approx(totals, abs=1e-3)
    if isinstance(model, GPSTForCausalLM):
        assert lm.max_length == model.config.max_position_embeddings
        longer = Instance("loglikelihood_rolling", {}, (" ".join(sentences * 3),), 0)
        assert lm.loglikelihood_rolling([longer])[0] < min(totals)  # in windows of the whole context


def test_minicons_gives_the_own_log_probabilities(scored):
    model, tokenizer, sentences, totals = scored
    own = copy.deepcopy(tokenizer)  # minicons changes it
    scorer = importlib.import_module("minicons.scorer").IncrementalLMScorer(model, "cpu", tokenizer=own)
    scores = scorer.sequence_score(sentences, reduction=lambda x: x.sum(0).item(), bos_token=True)
    assert scores == pytest.approx(totals, abs=1e-3)


def test_text_generation_pipeline(scored):
    model, tokenizer, sentences, _ = scored
    first, second = (" ".join(sentence.split()[:2]) for sentence in sentences[:2])
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 4, "do_sample": False}
    (single,) = generator(first, **options)
    assert single["generated_text"].startswith(first)
    together = generator([first, second], batch_size=2, num_beams=3, **options)
    assert together[1][0]["generated_text"] == generator(second, num_beams=3, **options)[0]["generated_text"]


@pytest.mark.parametrize("name", ["gpst-tiny", "rnng-tiny", "on-lstm-syd-tiny", "prpn-syd-tiny", "palm-s-tiny"])
def test_prompt_and_continuation_of_the_pipeline_are_one_text(name, capsys):
    generator = pipeline("text-generation", model=str(CARDS / name))
    model, tokenizer = generator.model, generator.tokenizer
    prompt = "the people of this country"
    options = {"max_new_tokens": 5, "do_sample": False, "suppress_tokens": tokenizer.all_special_ids}
    text = generator(prompt, **options)[0]["generated_text"]
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), streamer=streamer, **options)[0]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole == f" {text}" and len(text) > len(prompt)
    assert capsys.readouterr().out == whole + "\n"
    assert tokenizer.model_max_length == getattr(model.config, "max_position_embeddings", 1024)


def test_surprisal_of_characters_is_that_of_the_unknown_word():
    model = importlib.import_module("surprisal").CausalHuggingFaceModel(str(CARDS / "rnng-tiny"))
    [scores] = model.surprise(["Presidents hesitated yesterday"])
    assert float(scores[11:20, "char"]) == pytest.approx(float(scores[1:2, "word"]))


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in CARDS.glob("*/model.safetensors")), ids=lambda x: x.name
)
def test_the_package_surprisal_reads_the_own_logits(folder):
    from surprisal.model import CausalHuggingFaceModel

    tool = CausalHuggingFaceModel(str(folder))
    batch = tool.tokenizer(["the people of this country agree"], return_tensors="pt")
    (found,) = tool.surprise(["the people of this country agree"])
    ids = torch.cat([torch.tensor([[tool.tokenizer.bos_token_id]]), batch["input_ids"]], 1)
    with torch.no_grad():
        logits = tool.model(ids).logits
    logits[..., tool.tokenizer.eos_token_id] = -torch.inf  # the tool takes it for padding, and leaves it out
    expected = -logits.log_softmax(-1)[0, :-1].gather(1, batch["input_ids"][0, :, None])[:, 0]
    assert found.surprisals == pytest.approx(expected.numpy(), abs=1e-4)
