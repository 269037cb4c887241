"""Pushdown Layers: values, gradients and beams of the authors' program; tape, search, caches and padding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from hf_synlm.cli import main
from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.pushdown import convert_weights
from hf_synlm.data.collate import encode_words
from hf_synlm.data.treebank import read_treebank
from hf_synlm.hub.abilities import tree_codec
from hf_synlm.models.pushdown.configuration_pushdown import PushdownConfig
from hf_synlm.models.pushdown.modeling_pushdown import PushdownForCausalLM, PushdownModel
from hf_synlm.models.pushdown.tape import stack_tape
from hf_synlm.search.state import NEG_INF
from hf_synlm.trees.codecs import AttachmentCodec, tree_attachments
from tests.helpers.goldens import read_bytes, read_case, read_tensors
from tests.helpers.refusals import refused
from tests.helpers.search_models import varied
from tests.helpers.training_runs import sample_files

CASES = ("01_random", "02_trained", "03_additive", "04_binary_tape", "05_trained_long")
SEARCHED = tuple(case for case in CASES if case != "04_binary_tape")


def load_case(name: str) -> tuple[PushdownForCausalLM, dict[str, Any], dict[str, Tensor]]:
    state, io, meta = read_case(f"pushdown/{name}")
    return convert_state_dict("pushdown", state, meta), meta, io


def test_a_checkpoint_of_the_authors_becomes_a_folder(tmp_path: Path) -> None:
    weights, config = tmp_path / "state.safetensors", tmp_path / "meta.json"
    save_file(read_tensors("pushdown/01_random", "state"), weights)
    config.write_bytes(read_bytes("pushdown/01_random", "meta.json"))
    command = ["convert", "pushdown", "--weights", weights, "--config", config]
    assert main([str(word) for word in (*command, "--out", tmp_path / "model")]) == 0
    model, meta, golden = load_case("01_random")
    loaded = PushdownForCausalLM.from_pretrained(tmp_path / "model").eval()
    inputs = inputs_of(meta, golden)
    torch.testing.assert_close(loaded(**inputs).joint_log_prob, model(**inputs).joint_log_prob)
    assert loaded.config.end_token_id == 1 and loaded.config.pushdown_layers is None
    weights, options = read_tensors("pushdown/01_random", "state"), meta["config"]
    with pytest.raises(ValueError, match="configuration lacks .end_word_id"):
        convert_state_dict("pushdown", weights, {k: v for k, v in options.items() if k != "end_word_id"})
    with pytest.raises(ValueError, match="num_depths is 9 in the configuration, but 50"):
        convert_state_dict("pushdown", weights, {**options, "num_depths": 9})
    with pytest.raises(ValueError, match=r"pushdown_layers is \[0\] in the configuration, but"):
        convert_state_dict("pushdown", weights, {**options, "pushdown_layers": [0]})
    refused("model.more is", convert_state_dict, "pushdown", {**weights, "model.more": torch.zeros(1)}, options)
    with pytest.raises(ValueError, match="end_token_id 30. is also the begin, end or"):
        convert_state_dict("pushdown", weights, {**options, "end_word_id": 30, "eos_token_id": 30})
    other = torch.randn_like(weights["input_embedding.weight"])
    untied = convert_state_dict("pushdown", {**weights, "output_map.weight": other}, options)
    assert torch.equal(untied.lm_head.weight, other) and not untied.config.tie_word_embeddings


def inputs_of(meta: dict[str, Any], golden: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of begin token, tokens, end word and end token, as a tokenizer writes them."""
    ids = torch.nn.functional.pad(golden["input_ids"], (0, 1)).long()
    ids = ids.scatter(1, golden["lengths"][:, None].long(), meta["config"]["eos_token_id"])
    attachments = torch.nn.functional.pad(golden["attachment_labels"], (1, 0), value=-100).long()
    mask = torch.arange(ids.shape[1]) <= golden["lengths"][:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "attachments": attachments}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_authors(case: str) -> None:
    model, meta, golden = load_case(case)
    out = model(**inputs_of(meta, golden), output_logits=True)
    for name in ("language_model", "attachment"):
        torch.testing.assert_close(out.losses[name], golden[f"loss/{name}"].view(()), atol=1e-5, rtol=1e-5)
    for row, length in enumerate(golden["lengths"].tolist()):
        pairs = [(out.token_logits_given_tree[row, :length], golden["logits"][row, :length])]
        # The row of the end word attaches the end token, which the authors do not score.
        size = length - 1
        pairs.append((out.action_logits[row, :size, :length], golden["attachment_logits"][row, :size, :length]))
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        joint = golden["word_log_probs"][row].sum() + golden["attachment_log_probs"][row].sum()
        torch.testing.assert_close(out.joint_log_prob[row], joint, atol=1e-4, rtol=1e-5)
    if case not in ("02_trained", "05_trained_long"):
        out.loss.backward()
        grads = convert_weights(read_tensors(f"pushdown/{case}", "grads"), model.config)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("case", SEARCHED)
def test_beams_are_those_of_the_authors(case: str) -> None:
    model, meta, golden = load_case(case)
    for number, beams in meta["beams"].items():
        ids = torch.tensor([[*meta["sentences"][int(number)]["ids"], model.config.eos_token_id]])
        for width, expected in beams.items():
            kept = min(int(width), expected["n_final"], 20)
            out = model.parse(ids, num_beams=int(width), num_return_sequences=kept)
            best = torch.tensor([hypothesis["log_prob"] for hypothesis in expected["hypotheses"][:kept]])
            torch.testing.assert_close(out.log_probs[0], best, atol=1e-4, rtol=1e-5)
            assert out.text_log_probs.item() == pytest.approx(expected["log_marginal"], abs=1e-4, rel=1e-5)
            surprisal = torch.tensor(expected["surprisal"])
            torch.testing.assert_close(-out.token_log_probs[0], surprisal, atol=1e-4, rtol=1e-5)
            for actions, hypothesis in zip(out.actions[0], expected["hypotheses"], strict=False):
                assert [int(a) - 1 for a in actions if a > 0] == hypothesis["attachments"]
            model.config.scoring_num_beams = int(width)
            next_words = golden[f"beam/{number}/{width}/next_word_log_probs"]
            begin = torch.tensor([[model.config.bos_token_id]])
            logits = model(torch.cat([begin, ids[:, :-1]], 1)).logits[0]
            torch.testing.assert_close(logits, next_words, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------- the model alone
def tiny(vocab_size: int = 6, cls: Any = PushdownForCausalLM, **overrides: Any) -> Any:
    """A random model; ids 0 padding, 1 begin, 2 end."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    given = {"num_depths": 4, "attachment_depth_size": 4, "bos_token_id": 1, "eos_token_id": 2, **sizes, **overrides}
    torch.manual_seed(0)
    return varied(cls(PushdownConfig(vocab_size=vocab_size, dropout=0.0, **given)).eval(), 0.2)


def histories(num_tokens: int) -> list[list[int]]:
    """All legal attachments of positions 1 .. n, by a stack of last positions."""
    found = [([], [])]
    for position in range(1, num_tokens + 1):
        found = [
            ([*taken, a], [*(e for e in stack if e < a), position])
            for taken, stack in found
            for a in [*stack, position]
        ]
    return [taken for taken, _ in found]


def test_wide_beam_sums_over_all_histories_of_given_trees() -> None:
    """Logits are log p(next | prefix) and normalized, by teacher forcing of every history."""
    model = tiny()
    text = [3, 4, 5, 4]
    assert len(histories(4)) == 14  # Catalan numbers
    ids = torch.tensor([[1, *text]])
    model.config.scoring_num_beams = 100
    torch.testing.assert_close(model(ids).logits[0].logsumexp(-1), torch.zeros(5), atol=1e-5, rtol=0)
    out = model.parse(ids, num_beams=100, num_return_sequences=14)
    joints = []
    for taken in histories(4):
        joints.append(float(model(ids, attachments=torch.tensor([[-100, *taken]])).joint_log_prob))
    expected = torch.tensor(sorted(joints, reverse=True))
    torch.testing.assert_close(out.log_probs[0], expected, atol=1e-5, rtol=1e-5)
    prefixes = [
        torch.stack([model(ids[:, : n + 1], attachments=torch.tensor([[-100, *taken, -100]])).joint_log_prob[0]
                     for taken in histories(n - 1)]).logsumexp(0)
        for n in range(1, 5)
    ]  # fmt: skip
    before = torch.stack([torch.zeros(()), *prefixes[:-1]])
    torch.testing.assert_close(out.token_log_probs[0, 1:], torch.stack(prefixes) - before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key", ["mlp", "sum", "none"])
@pytest.mark.parametrize("end", [None, 5])
def test_trees_of_one_text_share_their_beginnings(key: str, end: int | None) -> None:
    """The same numbers as one by one; the layers read each distinct beginning once."""
    model = tiny(attachment_key=key, end_token_id=end).double()
    closing = {5: 0, 2: -100} if end else {2: -100}
    rows = torch.tensor([[*row, *closing.values()] for row in histories(5)])
    ids = torch.tensor([[3, 4, 4, 3, 4, *closing]]).expand(len(rows), -1)
    apart = model(ids, attachments=rows).joint_log_prob
    sizes: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[:2].numel()))
    torch.testing.assert_close(model.joint_log_probs(ids, attachments=rows), apart, rtol=1e-7, atol=0)
    beginnings = {tuple(row[:length]) for row in rows.tolist() for length in range(len(row) + 1)}
    assert sum(sizes) == len(beginnings) < len(rows) * ids.shape[1]
    torch.testing.assert_close(model.joint_log_probs(ids[:1], attachments=rows[:1]), apart[:1], rtol=1e-7, atol=0)


def test_tape_of_a_tree_by_hand() -> None:
    attachments = tree_attachments([(0, 2), (3, 5), (2, 5), (0, 5)], 5)
    assert attachments == [1, 1, 3, 4, 2]
    tape = stack_tape(torch.tensor([[0, *attachments, 6]]))[0]
    assert tape[[0, 1]].sum() == 0
    assert tape[2:5].tolist() == [[0, 1, 1, 0, 0, 0, 0]] * 3 and tape[6].tolist() == [0, 2, 2, 2, 3, 3, 0]
    refused("position 3 of row 0 is attached to 1", stack_tape, torch.tensor([[0, 1, 1, 1]]))
    depths = tiny().parse(torch.tensor([[3, 4, 5]]), num_beams=30).stack_depth[0]  # without the begin token
    assert depths[0] == 1 and (depths[1:] > 1).all() and (depths <= torch.arange(1, 4) + 1e-5).all()


def test_trees_and_words_of_pieces() -> None:
    model, ids = tiny(), torch.tensor([[3, 4, 5, 3, 4, 5]])
    ends = torch.tensor([[False, True, True, False, False, True]])
    out = model.parse(ids, word_ends=ends, num_beams=50, num_return_sequences=8)
    for spans in out.spans[0]:
        assert len(spans) == 5 and spans[-1] == (0, 6)
        assert {(0, 2), (3, 6)} <= set(spans)


def test_the_best_sequence_has_the_probability_of_its_tree() -> None:
    """Of a wide beam, and of its text with the tree that stands beside it."""
    model, ids = tiny(scoring_num_beams=30), torch.tensor([[1, 3, 4]])
    options = {"max_new_tokens": 3, "eos_token_id": None, "return_dict_in_generate": True, "length_penalty": 0.0}
    options["suppress_tokens"] = [2]  # it is not attached
    out = model.generate(ids, num_beams=30, **options)
    attachments = torch.tensor([[-100, *(int(a) - 1 for a in out.actions[0] if a > 0)]])
    joint = model(out.sequences, attachments=attachments).joint_log_prob
    prompt = model.parse(ids, num_beams=30).token_log_probs.sum(1)
    torch.testing.assert_close(out.sequences_scores, joint - prompt, atol=1e-4, rtol=1e-5)
    torch.manual_seed(0)
    drawn = [tuple(model.generate(ids, do_sample=True, **options).sequences[0, 3:].tolist()) for _ in range(20)]
    assert len(set(drawn)) > 5


def test_a_draw_of_forbidden_words_is_impossible() -> None:
    search = tiny().word_search(3)
    state = search.begin(2, torch.device("cpu"))
    for token in (3, 4):
        state, _ = search.commit(state, search.propose(state, torch.tensor([token, token])))

    def forbid(_: Tensor, log_probs: Tensor) -> Tensor:
        """All words of the second sentence."""
        return log_probs.index_fill(0, torch.tensor([1]), NEG_INF)

    chosen, words = search.draw_token(state, forbid)
    assert chosen.scores[0].isfinite().all() and (chosen.scores[1] == NEG_INF).all() and (words[1] == NEG_INF).all()


def test_model_without_trees_takes_the_best_ones(tmp_path: Path) -> None:
    (model := tiny()).save_pretrained(tmp_path)
    bare = PushdownModel.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5, 3], [0, 0, 5, 4]])
    actions = model.parse(ids).actions
    attachments = torch.full_like(ids, -100)
    attachments[0] = actions[0, 0][actions[0, 0] > 0] - 1
    attachments[1, 2:] = actions[1, 0][actions[1, 0] > 0] - 1
    assert torch.equal(bare(ids).last_hidden_state, bare(ids, attachments=attachments).last_hidden_state)


WRONG_INPUTS = [
    ({"attachments": None, "labels": torch.tensor([[3, 4, 4]])}, "labels need attachments"),
    ({"labels": torch.tensor([[3, 9, 4]])}, "labels must be input_ids, or -100"),
    ({"labels": torch.tensor([[3.0, 4.0, 4.0]])}, "labels must be input_ids, or -100"),
    ({"attachments": torch.tensor([[1, 2]])}, r"attachments are torch.int64 \(1, 2\)"),
    ({"attachments": torch.tensor([[1.0, 2.0, 1.0]])}, "attachments are torch.float32"),
    ({"attachments": torch.tensor([[1, 2, 30]])}, "position 3 of row 0 is attached to 30"),
    ({"attention_mask": torch.zeros(1, 3)}, "Row 0 of input_ids has no token"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_INPUTS)
def test_wrong_inputs_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"input_ids": torch.tensor([[3, 4, 4]]), "attachments": torch.tensor([[1, 2, 1]])}
    refused(message, tiny(), **{**given, **arguments})


def test_labels_change_the_loss_but_no_probability() -> None:
    model, ids, attachments = tiny(), torch.tensor([[3, 4, 5]]), torch.tensor([[1, 2, 1]])
    some = model(ids, attachments=attachments, labels=torch.tensor([[3, -100, 5]]))
    every = model(ids, attachments=attachments, output_logits=True)
    torch.testing.assert_close(some.joint_log_prob, every.joint_log_prob)
    words = every.token_logits_given_tree[0].log_softmax(-1)[[0, 2], [3, 5]]
    torch.testing.assert_close(some.losses["language_model"], -words.mean())


def test_text_goes_on_after_an_end_token() -> None:
    """It is shifted, as in training; the layers run on it."""
    model, ids = tiny(scoring_num_beams=100), torch.tensor([[3, 2, 4, 5]])
    attachments = torch.tensor([[1, -100, last, 4] for last in (1, 3)] + [[1, -100, 3, to] for to in (1, 2)])
    out = model(ids.expand(4, -1), attachments=attachments, output_logits=True)
    logits = model(ids).logits
    torch.testing.assert_close(logits[0, 1], out.token_logits_given_tree[0, 2].log_softmax(-1))
    past, steps = None, []
    for token in ids.split(1, 1):
        step = model(token, past_key_values=past, use_cache=True)
        past = step.past_key_values
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, 1), logits)
    found = model.parse(ids, num_beams=100, num_return_sequences=100)
    assert min((found.log_probs - value).abs().min() for value in out.joint_log_prob) < 1e-4
    assert found.log_probs.isfinite().sum() > 4 and found.spans[0][0][-1] == (0, 4)


def test_long_texts_and_half_precision() -> None:
    """The search agrees with `forward` beyond the first columns of its tape, and under autocast with itself."""
    model, ids = tiny(), torch.randint(3, 6, (2, 80))
    found = model.parse(ids, num_beams=2)
    actions = found.actions[:, 0]
    joint = model(ids, attachments=actions[actions > 0].view(2, 80) - 1).joint_log_prob
    torch.testing.assert_close(joint, found.log_probs[:, 0], rtol=1e-5, atol=0)
    expected = model.parse(ids[:, :9], num_beams=5).log_probs
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.parse(ids[:, :9], num_beams=5).log_probs, expected)


def test_dropout_everywhere() -> None:
    """Every rate acts: layers, and the three networks of the attachment head."""
    model = tiny()
    ids, attachments = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 2, 1]])
    expected = model(ids, attachments=attachments, output_logits=True)
    head = model.attachment_head
    for part in (head.query_mlp, head.shift_mlp, head.key_mlp, *model.model.layers):
        part.train()
        part.dropout.p = 0.5
        found = model(ids, attachments=attachments, output_logits=True)
        assert not torch.allclose(found.action_logits[0, 1], expected.action_logits[0, 1]), part
        part.eval()


def test_initialization_is_that_of_the_authors() -> None:
    """Also where there are as many depths as words."""
    model = PushdownForCausalLM(
        PushdownConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, intermediate_size=96)
    )
    layer, bound = model.model.layers[0], (6 / (64 + 96)) ** 0.5
    deviations = {
        model.model.embed_tokens: (6 / (50 + 64)) ** 0.5 / 3**0.5,
        layer.attention.depth_embedding: 1.0,
        model.attachment_head.depth_embedding: 1.0,
        layer.up_proj: 2**0.5 * bound / 3**0.5,
        layer.down_proj: bound / 3**0.5,
        layer.attention.q_proj: 64**-0.5 / 3**0.5,
    }
    for module, expected in deviations.items():
        assert module.weight.std().item() == pytest.approx(expected, rel=0.1), module


def test_gold_trees_over_pieces() -> None:
    """(the (blue birds)) sing, birds in two pieces: (((the (blue (bi rds))) sing)."""
    ends, tree = [True, True, False, True, True], [("X", 0, 3), ("X", 1, 3), ("X", 0, 4)]
    assert AttachmentCodec().encode(range(5), ends, tree)["attachments"] == [1, 2, 3, 1, 4]


@pytest.fixture
def run(tmp_path: Path, program: Callable[..., dict]) -> Callable[..., dict]:
    """Runs the program in this process on a few trees; its results and what it printed."""
    files = sample_files(tmp_path, "trees", train=24, valid=6, test=3)
    argv = "--config pushdown_tiny --overwrite-output-dir False --num-beams 2 --batch-group-size 8".split()
    argv += "--per-device-train-batch-size 4 --num-train-epochs 2 --checkpointing-steps 1".split()
    argv += ["--train-files", files["train"], "--validation-files", files["valid"], "--test-files", files["test"]]
    argv += ["--config-overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=24"]
    return lambda output_dir, *flags: program("train_pushdown", [*argv, "--output-dir", str(output_dir), *flags])


def test_program_trains_and_searches(run: Callable[..., dict], tmp_path: Path) -> None:
    flags = ("--gradient-accumulation-steps", "2", "--checkpoints-total-limit", "9", "--tokenizer-type", "bpe")
    flags = (*flags, "--tokenizer-min-frequency", "1", "--tokenizer-vocab-size", "300")
    results = run(tmp_path / "out", *flags)
    search, losses = results["test"]["search"], results["test"]["losses"]
    assert 0 <= search["unlabeled_f1"] <= 100 and "labeled_f1" not in search and search["word_perplexity"] > 1
    # The likelihood of the test trees is that of the saved model.
    model = PushdownForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()
    tokenizer, nats = AutoTokenizer.from_pretrained(tmp_path / "out" / "model"), 0.0
    for sentence in read_treebank(tmp_path / "trees.test.txt"):
        ids, is_end = encode_words(tokenizer, sentence.words)
        codec = tree_codec(model.config)
        nats -= model(**codec.pad([codec.encode(ids, is_end, sentence.labeled_spans)])).joint_log_prob.item()
    assert losses["nats"] == pytest.approx(nats, rel=1e-5)


def test_beams_of_actions_are_refused(run: Callable[..., dict], tmp_path: Path) -> None:
    refused("action-beam-size is 5, a beam of RNNG", run, tmp_path / "run", "--action-beam-size", "5")
