"""Tree LM: the authors' numbers, the walk with a stack, exact sums over derivations, and the contract of a model."""

import copy
import functools
import itertools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_synlm import TreeLMConfig, TreeLMForCausalLM, TreeLMForSequenceClassification, TreeLMModel
from hf_synlm.core.matrix_products import ONEDNN_TYPES, uses_onednn
from hf_synlm.data.gold_trees import encode_trees, label_inventory
from hf_synlm.data.treebank import parse_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.models.tree_lm import stack_machine
from hf_synlm.models.tree_lm.backbone import PackedProducts
from hf_synlm.models.tree_lm.bottom_up import BinaryTreeLMStackMachine
from hf_synlm.models.tree_lm.linearization import linearize
from hf_synlm.models.tree_lm.stack_machine import TreeLMStackMachine
from hf_synlm.search import tree_attention
from hf_synlm.trees.codecs import LabeledCodec, binary_constituents
from hf_synlm.trees.transitions import TransitionSystem
from tests.helpers.garbage import tensors_in_cycles
from tests.helpers.goldens import cases_of, read_meta, read_tensors
from tests.helpers.refusals import refused
from tests.helpers.search_models import varied
from tests.models.rnng.test_rnng_derivations import batch_of, draw
from tests.models.rnng.test_rnng_fast_track import check_exact
from tests.reference.tree_lm import log_probs, positions

TINY = {
    "vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "nonterminals": ["NP", "S", "VP"], "scoring_num_beams": 4, "action_beam_size": 12, "dropout": 0.0,
}  # fmt: skip
# Causal attention over labels after words, too, and two decoders of transformers.
STRUCTURES = ("causal", "stack_compose", "binary", "gpt2", "qwen3")
LENGTHS = [7, 1, 4, 10, 2]
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def decoder_config(kind):
    sizes = {"vocab_size": TINY["vocab_size"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 8, "sliding_window": None, "ffn_dim": 24}
    more |= {"word_embed_proj_dim": 16, "tie_word_embeddings": kind != "llama", "bos_token_id": 0, "eos_token_id": 1}
    return CONFIG_MAPPING[kind](**sizes, **more)


def tiny(cls=TreeLMForCausalLM, **overrides):
    torch.manual_seed(0)
    if overrides.get("structure_attention") == "binary":
        overrides["linearization"] = overrides.pop("structure_attention")
        overrides["eos_token_id"] = 1
    elif overrides.get("structure_attention") in CONFIG_MAPPING:
        config = decoder_config(overrides.pop("structure_attention"))
        for name in ("hidden", "attention", "embd", "resid", "attn"):
            setattr(config, f"{name}_pdrop", 0.0)
        overrides["backbone_config"] = config
    return varied(cls(TreeLMConfig(**{**TINY, **overrides})), 0.1).eval()


def batch(lengths=LENGTHS, pieces=False, left=False, structure="causal"):
    values = batch_of(draw(structure if structure == "binary" else "top_down", lengths, pieces, seed=1), left)
    values["input_ids"] += values["input_ids"] == 1  # the end token
    return values if pieces else {name: value for name, value in values.items() if name != "word_ends"}


@pytest.fixture(params=STRUCTURES)
def structure(request):
    return request.param


# --------------------------------------------------------------------------------------------- the authors' numbers
def meta_of(case):
    return read_meta(f"tree_lm/{case}")


def derivation(text, meta):
    """Actions and words of a linearized tree of the authors."""
    actions, words = [], []
    for token in text.split()[1:]:
        if token[0] == "(":
            actions.append(3 + meta["labels"].index(token[1:]))
        elif token[-1] == ")":
            actions.append(2)
        else:
            actions.append(1)
            words.append(meta["first_word"] + int(token[1:]))
    return torch.tensor([actions]), torch.tensor([words])


def config_of(meta, **more):
    return TreeLMConfig(
        vocab_size=meta["first_opening"], nonterminals=meta["labels"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        structure_attention="causal" if meta["rule"] == "txl" else "stack_compose", **more,
    )  # fmt: skip


@functools.cache
def names_of(num_layers):
    """The authors' names of parameters -> ours; weights of layers are transposed."""
    names = {}
    for number in range(num_layers):
        theirs, ours = f"core/h{number}", f"model.layers.{number}"
        names |= {
            **{f"{theirs}_attn/{x}/w": f"{ours}.attention.{x[0]}_proj.weight" for x in ("query", "key", "value")},
            f"{theirs}_attn/relative_keys/w": f"{ours}.attention.relative_proj.weight",
            f"{theirs}_attn/r_w_bias": f"{ours}.attention.content_bias",
            f"{theirs}_attn/r_r_bias": f"{ours}.attention.position_bias",
            f"{theirs}_attn/linear/w": f"{ours}.attention.o_proj.weight",
            f"{theirs}_attn/linear/b": f"{ours}.attention.o_proj.bias",
            f"{theirs}_mlp/linear/w": f"{ours}.up_proj.weight",
            f"{theirs}_mlp/linear/b": f"{ours}.up_proj.bias",
            f"{theirs}_mlp/linear_1/w": f"{ours}.down_proj.weight",
            f"{theirs}_mlp/linear_1/b": f"{ours}.down_proj.bias",
        }
        for norm, ours_norm in (("ln1", "attention_norm"), ("ln2", "feed_forward_norm")):
            names[f"{theirs}_{norm}/scale"] = f"{ours}.{ours_norm}.weight"
            names[f"{theirs}_{norm}/offset"] = f"{ours}.{ours_norm}.bias"
    return names


def renamed(state, config):
    """Tensors of the authors by our names."""
    names, found = names_of(config.num_hidden_layers), {}
    for name, value in state.items():
        name = name.removeprefix("lm/~/")
        if name in names:
            found[names[name]] = value.T if name.endswith("/w") else value
            continue
        where = {
            "embedding_layer/input_embedding": ("model.embed_tokens.weight", "model.embed_labels.weight"),
            "embedding_layer/output_weights": ("lm_head.weight", "label_head.weight"),
            "embedding_layer/bias": ("lm_head.bias", "label_head.bias"),
        }[name]
        value = value.T if "output_weights" in name else value
        found |= dict(zip(where, value.split([config.vocab_size, len(value) - config.vocab_size]), strict=True))
    return found


def golden_model(case, **more):
    meta = meta_of(case)
    sizes = meta["model"]
    config = config_of(
        meta, hidden_size=sizes["d_model"], num_hidden_layers=sizes["num_layers"], dropout=0.0,
        num_attention_heads=sizes["num_heads"], intermediate_size=sizes["ffw_hidden_size"], loss_normalization="sum",
        tie_word_embeddings=sizes["tied_input_output_embeddings"],
        max_relative_position=sizes.get("max_relative_position") or 62, **more,
    )  # fmt: skip
    model = TreeLMForCausalLM(config).eval()
    state = renamed(read_tensors(f"tree_lm/{case}", "state"), config)
    missing = model.load_state_dict(state, strict=False)
    tied = [] if not config.tie_word_embeddings else ["lm_head.weight", "label_head.weight"]
    assert missing.missing_keys == tied and not missing.unexpected_keys
    model.tie_weights()
    return model, meta


@pytest.mark.parametrize("case", [case for case in cases_of("tree_lm") if case.startswith("mask_")])
def test_masks_and_positions_of_the_authors(case):
    meta, io = meta_of(case), read_tensors(f"tree_lm/{case}", "io")
    actions, words = derivation(meta["text"], meta)
    plan = linearize(actions, words, config_of(meta, min_relative_position=-20))
    size = plan.tokens.shape[1]
    assert plan.tokens[0].tolist() == io["inputs"][0, :size].tolist() and not io["inputs"][0, size:].any()
    seen = io["attention_mask"][0, :size, :size].bool()
    assert torch.equal(plan.mask[0], seen)
    relative = io["relative_position"][0, :size, -io["inputs"].shape[1] :][:, :size]
    assert torch.equal((plan.relative[0] - 20)[seen], relative[seen].long())


@pytest.mark.parametrize("case", ["tg_random_L2", "tg_clipped_untied_L2", "tg_trained_L2", "txl_trees_random_L2"])
def test_numbers_of_the_authors(case):
    """Log-probabilities, loss and gradients. Of the causal case two pieces: its memory is as long as one."""
    model, meta = golden_model(case)
    io = read_tensors(f"tree_lm/{case}", "io")
    whole = model.config.structure_attention == "stack_compose"
    pieces, loss = io["inputs"].shape[0], torch.zeros(())
    for row, text in enumerate(meta["texts"]):
        actions, words = derivation(text, meta)
        output = model(words, actions=actions, output_logits=True)
        loss = loss + output.loss
        states = model.model(words, actions=actions).action_hidden_state
        found = torch.cat([model.lm_head(states), model.label_head(states)], -1).log_softmax(-1)[0]
        labels = torch.cat([io["labels"][piece, row] for piece in range(pieces) if io["seq_idx"][piece, row] >= 0])
        expected = torch.cat([io["log_probs"][piece, row] for piece in range(pieces) if io["seq_idx"][piece, row] >= 0])
        predicted = labels > 0
        count = len(found) if whole else min(len(found), 2 * io["inputs"].shape[2])
        torch.testing.assert_close(found[:count], expected[predicted][:count], **TOLERANCE)
        if whole:
            torch.testing.assert_close(output.joint_log_prob[0], io["sequence_log_prob"][row], rtol=1e-6, atol=1e-5)
    if not whole:
        return
    torch.testing.assert_close(loss.detach(), io["loss_sum"][0], rtol=1e-6, atol=1e-5)
    loss.backward()
    for name, value in renamed(read_tensors(f"tree_lm/{case}", "grads"), model.config).items():
        own = model.get_parameter(name).grad
        torch.testing.assert_close(own, value, rtol=0, atol=1e-5 * max(1.0, float(value.abs().max())))


class _FewLabels(TreeLMStackMachine):
    """NP and S may open, and the length of a sentence is known."""

    def price_of_ends(self, pool, nodes, num_tokens):
        return torch.zeros(nodes.shape)

    def legal_actions(self, *args, **kwargs):
        legal = super().legal_actions(*args, **kwargs)
        legal[..., [3, 5, 7]] = False
        return legal


@pytest.mark.parametrize("number", range(6))
def test_search_of_the_prototype(number):
    """Prefix probabilities of beams, and exact ones; the words are all ids but the four special ones."""
    case = read_meta("tree_lm/tg_trained_L2", "search")["cases"][number]
    model, meta = golden_model("tg_trained_L2", max_consecutive_nonterminals=case["max_consecutive_openings"])
    model.stack_machine_class = _FewLabels
    if case["renormalize"]:
        model.lm_head.bias.data[: meta["first_word"]] = -1e4
    width = case["action_beam_size"] or 1000
    output = model.parse(
        torch.tensor([[meta["first_word"] + word for word in case["words"]]]),
        num_beams=case["num_beams"] or width, action_beam_size=width, fast_track_size=case["fast_track_size"],
        normalization="search" if case["renormalize"] else "train",
    )  # fmt: skip
    found = [*output.token_log_probs[0].cumsum(0).tolist(), float(output.text_log_probs)]
    assert found == pytest.approx(case["log_marginals"], abs=1e-4)


def test_proposal_trees_of_the_authors():
    model, meta = golden_model("tg_trained_L2")
    proposals = read_meta("tree_lm/tg_trained_L2", "proposals")
    for text, expected in zip(proposals["trees"], proposals["log_joint"], strict=True):
        actions, words = derivation(text, meta)
        assert float(model(words, actions=actions).joint_log_prob) == pytest.approx(expected, abs=1e-4)


# ------------------------------------------------------------------------------------------------- slow and obvious


def test_the_walk_with_a_stack(structure):
    """Random trees, unary chains and constituents in others of the same label included."""
    model, values = tiny(structure_attention=structure), batch(left=True, structure=structure)
    plan = model.model.lay_out(values["input_ids"], values["actions"], values["attention_mask"].bool(), None)
    together = model(**values, output_logits=True)
    for row, actions in enumerate(values["actions"]):
        actions = [action for action in actions.tolist() if action]
        words = values["input_ids"][row, values["attention_mask"][row].bool()].tolist()
        expected = positions(actions, words, model.config)
        assert plan.tokens[row, : len(expected)].tolist() == [position.token for position in expected]
        for place, position in enumerate(expected):
            assert plan.mask[row, place].nonzero()[:, 0].tolist() == position.sees
        slow = log_probs(model, actions, words).detach()
        gold = slow.gather(1, plan.targets[row, : len(actions), None]).sum()
        torch.testing.assert_close(together.joint_log_prob[row], gold)
        found = together.action_logits[row, : len(actions)].log_softmax(-1)
        if structure == "binary":
            torch.testing.assert_close(found[:, 3], slow[:, 1])
            slow[:, 1] = -math.inf
        torch.testing.assert_close(found[:, 1], slow[:, :19].logsumexp(1))
        torch.testing.assert_close(found[:, model.config.system.first_nonterminal :], slow[:, 19:22])


# -------------------------------------------------------------------------------------------------- exact sums
@pytest.mark.parametrize("normalization", ["search", "train"])
def test_search_is_the_sum_over_all_derivations(structure, normalization):
    limits = {"max_open_nonterminals": 3, "max_consecutive_nonterminals": 2, "nonterminals": ["A", "B"]}
    model = tiny(structure_attention=structure, vocab_size=6, normalization=normalization, **limits)
    check_exact(model, [3, 5, 2, 4] if structure == "binary" else [3, 5], normalization, width=600)


# ------------------------------------------------------------------------------------------------------ the contract
def test_parse_finds_what_forward_scores(structure):
    model, values = tiny(structure_attention=structure), batch(structure=structure)
    output = model.parse(values["input_ids"], values["attention_mask"], normalization="train")
    scored = model(values["input_ids"], values["attention_mask"], actions=output.actions[:, 0])
    torch.testing.assert_close(scored.joint_log_prob, output.log_probs[:, 0], rtol=1e-4, atol=1e-4)
    classifier = tiny(TreeLMForSequenceClassification, structure_attention=structure)
    assert classifier(values["input_ids"], values["attention_mask"]).logits.isfinite().all()
    assert tiny(TreeLMModel, structure_attention=structure)(values["input_ids"]).last_hidden_state.isfinite().all()


BAD_DERIVATIONS = [
    ("causal", [3, 1, 2, 4, 1, 1, 2], "row 0.*position 3"),
    ("causal", [3, 1, 1, 2], "token"),
    ("causal", [1, 3, 1, 1, 2], "SHIFT"),
    ("causal", [3, 1, 1, 99, 1, 2, 2], "action 99"),
    ("binary", [1, 1, 4, 1, 3, 4], "row 0.*position 4.*FINISH"),
    ("binary", [1, 1, 4, 1, 4], "finished"),
    ("binary", [1, 4, 1, 1, 4, 3], "position 1.*two"),
    ("binary", [1, 1, 99, 1, 4, 3], "action 99"),
    ("binary", [1, 1, 2, 1, 4, 3], "position 2"),
]


@pytest.mark.parametrize(("structure", "actions", "message"), BAD_DERIVATIONS)
def test_bad_derivations_are_named(structure, actions, message):
    refused(message, tiny(structure_attention=structure), torch.tensor([[5, 6, 7]]), actions=torch.tensor([actions]))


def test_pieces_of_a_word_are_one_element():
    """In the search as in given derivations: all trees over three words, the second of two pieces."""
    model = tiny(structure_attention="binary", nonterminals=["A", "B"], subwords=True)
    check_exact(model, [5, 6, 7, 8], "train", [True, False, True, True], width=50)


def test_trees_of_the_treebank_come_back():
    """Binarized, encoded, and out of the search: chains and added nodes are gone, but constituents of one word, too."""
    text = "(S (VP (NP (D the) (J old) (N dog)) (V barks) (A (R loudly)) (X (P at) (N it))))"
    (tree,) = parse_treebank([text])
    labels = label_inventory([tree], "binary")
    assert labels == ("@", "NP", "S+VP", "X")
    assert binary_constituents(tree.labeled_spans, 7)[-1] == ("S+VP", 0, 7)
    assert binary_constituents([("NP", 0, 2), ("@", 0, 3)], 3) == [("NP", 0, 2), ("@", 0, 3)]
    refused("'@' has a meaning in binary trees", binary_constituents, [("@", 0, 2), ("S", 0, 3)], 3)
    system = TransitionSystem("binary", len(labels))
    (encoded,) = encode_trees([tree], word_tokenizer([tree.words], min_count=1), LabeledCodec("binary", labels))
    machine = BinaryTreeLMStackMachine(tiny(structure_attention="binary", nonterminals=list(labels)))
    actions = encoded["actions"]
    starts = [stack.start for stack in system.steps(actions)]
    ends = list(itertools.accumulate(action == 1 for action in actions))
    spans, found = machine._tree(actions, starts, ends)
    assert list(zip(found, spans, strict=True)) == [
        (label, (i, j)) for label, i, j in tree.labeled_spans if j - i > 1
    ]  # fmt: skip


# Sentence and last node of each state of a call. Nodes 0 to 19 are a chain, 20 follows 10, 21 follows 19, 22 and 23 21.
CALLS = {
    "nothing in common": [(0, 0), (1, 20)],
    "all in common": [(0, 20)] * 5,
    "branches": [(0, k) for k in (0, 3, 20, 21, 21, 22, 23)],
    "two sentences": [(0, 20), (0, 23), (0, 22), (1, 20), (1, 5), (1, 22)],
}


@pytest.mark.parametrize("states", CALLS.values(), ids=CALLS)
@torch.no_grad()
def test_common_nodes_are_gathered_once(structure, states, monkeypatch):
    """New states that see the columns of all through a mask get the numbers that paths of their own give."""
    sentence, last = torch.tensor(states).unbind(1)
    kind = BinaryTreeLMStackMachine if structure == "binary" else TreeLMStackMachine
    machine = kind(tiny(structure_attention=structure))
    machine.watch_attention("raw")
    pool, _ = machine.begin(int(sentence.max()) + 1, torch.device("cpu"))
    pool.reserve(23)
    new = slice(24, 24 + len(states))
    own = pool.reserve(len(states)) + torch.arange(len(states)).expand(pool.batch_size, -1)
    parents = torch.tensor([-1, *range(19), 10, 19, 21, 21, *last])
    lengths = torch.tensor([*range(20), 11, 20, 21, 21, *[0] * len(last)])
    lengths[new] = lengths[last] + 1
    for name, values in {"predecessor": parents, "below": parents, "length": lengths, "depth": lengths}.items():
        pool.field(name)[:] = values
    if pool.batch_size == 1 and structure in CONFIG_MAPPING:
        pool.context = {name: torch.randn(1, 4, pool.features[name].shape[2]) for name in ("layer_0", "layer_1")}
        pool.num_context += 3
    for values in pool.features.values():
        values.normal_()
    live = sentence == torch.arange(pool.batch_size)[:, None]
    found, rows, decode = [], [], machine.model.decode
    monkeypatch.setattr(machine.model, "decode", lambda x, *more: rows.append(len(x)) or decode(x, *more))
    for most in (0, 100):
        monkeypatch.setattr(tree_attention, "_DENSE", most)
        before, plain = last.expand_as(own), torch.zeros_like(live)
        sizes = machine._sizes(pool, before, live, plain)
        machine._execute(pool, before, live, plain, own, own % 19, sizes, are_words=True)
        found.append({name: values[:, new][live] for name, values in pool.features.items()})
    assert rows[0] == max(4, len(states)) and rows[-1] == (1 if pool.batch_size == 1 else rows[0])
    for name, values in found[0].items():
        assert torch.allclose(values, found[1][name], **TOLERANCE), name


# ------------------------------------------------------------------------------------------------------ backbones
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3", "mistral", "opt", "gpt_neox"])
def test_a_decoder_of_transformers_is_the_backbone(kind, tmp_path):
    torch.manual_seed(0)
    decoder = varied(AutoModelForCausalLM.from_config(decoder_config(kind)).eval(), 0.1)
    decoder.save_pretrained(tmp_path / "decoder")
    model = TreeLMForCausalLM.from_backbone(tmp_path / "decoder", ["NP", "S"], scoring_num_beams=20)
    ids = torch.tensor([[5, 6, 7]])
    output = model.parse(ids, num_return_sequences=3, normalization="train")
    assert not tensors_in_cycles(lambda: model.parse(ids))
    # The same ids, labels included, through the decoder with the tables of both.
    decoder.resize_token_embeddings(TINY["vocab_size"] + 4)
    for table, parts in (
        (decoder.get_output_embeddings(), (model.lm_head, model.label_head)),
        (decoder.get_input_embeddings(), (model.model.embed_tokens, model.model.embed_labels)),
    ):
        table.weight.data = torch.cat([part.weight.data for part in parts])
    for actions, found in zip(output.actions[0], output.log_probs[0], strict=True):
        tokens = linearize(actions[actions != 0][None], ids, model.config).tokens
        log_probs = decoder(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])
        torch.testing.assert_close(found, log_probs.sum(), rtol=1e-5, atol=1e-4)
    model.save_pretrained(tmp_path / "tree_lm")
    again = TreeLMForCausalLM.from_pretrained(tmp_path / "tree_lm")
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


UNFIT_DECODERS = [
    ("bert", {"is_decoder": True}, "'bert', not a decoder"),
    ("mistral", {"sliding_window": 8}, "sliding_attention"),
    ("mamba", {}, "linear_attention"),
    ("bloom", {"n_head": 4}, "position_ids"),
    ("cohere", {"logit_scale": 0.5}, "scales or caps"),
]


@pytest.mark.parametrize(("kind", "more", "message"), UNFIT_DECODERS)
def test_decoders_that_do_not_fit_are_refused(kind, more, message, tmp_path):
    config = decoder_config(kind)
    for name, value in more.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refused(message, TreeLMForCausalLM.from_backbone, tmp_path, ["NP", "S"])


def test_half_precision_knows_words_as_their_distribution_does():
    """Logits of halves are rounded, so that a word and the sum over all words come from the same product."""
    torch.manual_seed(0)
    model = TreeLMForCausalLM(TreeLMConfig(**TINY)).eval().bfloat16()
    with torch.no_grad():
        model.lm_head.bias[5] += 30  # nearly certain: a score above 0 would be seen
    words = model.parse(torch.tensor([[5, 5, 5]]), lexical=True).lexical_log_probs
    assert words.max() <= 0 and words.min() > -0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_products(dtype):
    """A weight that changes after it was packed tells which product was computed."""
    layer, other = torch.nn.Linear(21, 13, dtype=dtype), torch.nn.Linear(21, 13, bias=False, dtype=torch.float64)
    x, seen = torch.randn(2, 3, 21, dtype=dtype), []
    expected = layer(x)
    own = torch.nn.Linear(21, 13, dtype=dtype)
    own.forward = lambda x: x  # as hooks of accelerate do
    packed = PackedProducts(torch.nn.ModuleList([layer, other, own]))
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    layer.weight.mul_(2)
    changed = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with packed:
        torch.testing.assert_close(layer(x), expected if uses_onednn(layer.weight, ONEDNN_TYPES) else changed)
        torch.testing.assert_close(layer(x[0, 0]), layer(x)[0, 0])
        assert other(x.double()).dtype == torch.float64
        assert own(x) is x
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
        with ThreadPoolExecutor(1) as thread:
            torch.testing.assert_close(thread.submit(layer, x).result(), changed)
    torch.testing.assert_close(gradient, x.sum((0, 1)).expand(13, 21))
    # A copy of a cache shares the products, and a saved one does without.
    assert copy.deepcopy(packed) is packed and not isinstance(pickle.loads(pickle.dumps(packed)), PackedProducts)
    torch.testing.assert_close(layer(x), changed)
    assert len(seen) == 6


@torch.no_grad()
@pytest.mark.parametrize(("num_beams", "action_beam_size"), [(3, 8), (40, 60)])
def test_words_that_are_generated_ahead_change_nothing(structure, num_beams, action_beam_size, monkeypatch):
    """They save calls of the layers, also beside sentences that are over."""
    model = tiny(structure_attention=structure, search_order="best_first")
    inputs = {k: v for k, v in batch(structure=structure).items() if k in ("input_ids", "attention_mask")}
    prepare, read, calls, found = TreeLMStackMachine._prepare, TreeLMStackMachine._read, [], []
    monkeypatch.setattr(TreeLMStackMachine, "_read", lambda *a, **kw: calls.append(len(a[2])) or read(*a, **kw))
    monkeypatch.setattr(stack_machine, "_GATHERED_ELEMENTS", 1 << 15)  # calls are split
    for ahead in (True, False):

        def choose(self, model, ahead=ahead):
            prepare(self, model)
            self.shifts_ahead = ahead

        monkeypatch.setattr(TreeLMStackMachine, "_prepare", choose)
        parsed = model.parse(**inputs, num_beams=num_beams, action_beam_size=action_beam_size)
        assert all(4 <= rows <= 32 or rows % 4 == 0 for rows in calls)  # new numbers of rows cost memory
        found.append((parsed, len(calls), sum(calls)))
        calls.clear()
    (first, few, rows), (second, many, least) = found
    assert few < many and rows < 1.03 * least and first.spans == second.spans and first.labels == second.labels
    torch.testing.assert_close(first.log_probs, second.log_probs, **TOLERANCE)


@pytest.mark.parametrize("structure", ["causal", "stack_compose", "gpt2"])
@torch.no_grad()
def test_words_that_are_generated_ahead_belong_to_one_commit(structure):
    """Sentences that stay where they are keep their beam; of other sentences nothing is left."""
    model = tiny(structure_attention=structure, search_order="best_first", normalization="train")
    search = model.word_search(2, action_beam_size=8)
    state, tokens = search.begin(3, torch.device("cpu")), torch.tensor([5, 6, 7])
    state, _ = search.commit(state, search.propose(state, tokens))
    chosen = search.propose(state, torch.tensor([0, 0, 0]))
    assert (state.ahead >= 0).any()
    new, _ = search.commit(state, chosen, active=torch.tensor([True, False, True]))
    assert new.num_tokens.tolist() == [2, 1, 2] and (new.pool.field("token", new.nodes)[1] == 6).all()
    state.select_rows(torch.tensor([0, 2]))
    assert state.ahead is None


def test_activations_of_a_backbone_are_checkpointed():
    model, values = tiny(structure_attention="qwen3").train(), batch()
    gradients = []
    for enable in (lambda: None, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        model(**values).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    torch.testing.assert_close(*gradients)
    refused("does not support", tiny().gradient_checkpointing_enable)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo"])
def test_a_backbone_has_only_so_many_positions(kind, monkeypatch):
    """A tree of two words has at most eleven; columns of many states of a call are no positions."""
    if kind == "gpt2":
        config = decoder_config(kind)
        config.n_positions = 12
    else:  # one of its layers sees twelve
        local = {"attention_types": [[["global", "local"], 1]], "window_size": 12}
        config = CONFIG_MAPPING[kind](vocab_size=19, hidden_size=16, num_layers=2, num_heads=4, **local)
    model = TreeLMForCausalLM(TreeLMConfig(backbone_config=config, max_consecutive_nonterminals=2, **TINY))
    monkeypatch.setattr(tree_attention, "_DENSE", 100)
    model.parse(torch.tensor([[2, 3]]), action_beam_size=50)
    refused("13 positions or more, and the backbone has 12", model.parse, torch.arange(2, 15)[None])
