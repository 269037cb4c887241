"""How texts end, and what special tokens weigh, in models with labeled trees: against the scores of derivations."""

from typing import Any

import pytest
import torch

from tests.helpers.architectures import build

PAD, END, BEGIN = 0, 1, 2
MODELS = ("rnng", "rnng, in-order", "tree_lm", "tree_lm, causal", "tree_lm, binary")
every_model = pytest.mark.parametrize("name", MODELS)


def model_of(name: str, normalization: str) -> Any:
    special = {"eos_token_id": END} | ({} if name.startswith("rnng") else {"bos_token_id": BEGIN})
    labels = {"vocab_size": 12, "nonterminals": ["S", "X"], "max_open_nonterminals": 3}
    model = build(name, normalization=normalization, **labels, **special)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


@every_model
def test_words_that_never_come_weigh_nothing(name: str) -> None:
    """Under "search": padding, and where labels and words share a softmax, the begin and end token."""
    model, ids = model_of(name, "search"), torch.tensor([[5, 6, 7]])
    wide = {"num_beams": 300, "action_beam_size": 300, "stepwise": True}
    before = model.parse(ids, **wide)
    model.lm_head.bias.data[PAD if name.startswith("rnng") else [PAD, BEGIN, END]] = 3.0
    if "binary" in name:  # there the end token is an action
        model.lm_head.bias.data[END] = 0.0
        before, model.lm_head.bias.data[[PAD, BEGIN]] = model.parse(ids, **wide), -9.0
    after = model.parse(ids, **wide)
    for field in ("text_log_probs", "token_log_probs", "stepwise_log_probs"):
        torch.testing.assert_close(after[field], before[field], atol=1e-5, rtol=0)


@every_model
@pytest.mark.parametrize("options", [{"num_beams": 30, "length_penalty": 0.0}, {"do_sample": True}])
def test_scores_of_texts_that_end_are_those_of_their_derivations(name: str, options: dict[str, Any]) -> None:
    """Up to the probability of the prompt's beam, which all of them share."""
    model, prompt = model_of(name, "train"), torch.tensor([[5, 6]])
    more = {"num_return_sequences": 30, "max_new_tokens": 3, "action_beam_size": 300, "return_dict_in_generate": True}
    out = model.generate(prompt, eos_token_id=END, pad_token_id=PAD, **more, **options)
    differences = []
    for ids, actions, score in zip(out.sequences, out.actions, out.sequences_scores, strict=True):
        words = ids[: ids.tolist().index(END)] if END in ids else ids[ids != PAD]
        joint = model(words[None], actions=actions[actions > 0][None]).joint_log_prob
        differences.append(float(joint - score))
    assert (out.sequences == END).any() or "do_sample" in options  # draws of some models do not end so soon
    assert differences == pytest.approx([differences[0]] * len(differences), abs=1e-4)
