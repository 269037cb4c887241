"""The LSTM baseline as a model of transformers: the contract of `forward`, its cache, generation, saving, tools."""

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

from hf_synlm import LSTMConfig, LSTMForCausalLM, LSTMModel
from hf_synlm.hub.export import check_complete, export_model
from hf_synlm.hub.verify import verify_export
from hf_synlm.recurrent_cache import RecurrentCache

TINY = {"vocab_size": 30, "embedding_size": 10, "hidden_size": 12, "num_layers": 2, "dropout": 0.2}
SENTENCES = ["the keys to the cabinet are on the table", "fruit flies like a banana", "flies like the table"]


def tiny(cls=LSTMForCausalLM, **overrides):
    torch.manual_seed(0)
    return cls(LSTMConfig(**{**TINY, **overrides})).eval()


def ids_of(*lengths, width=None, left=False):
    torch.manual_seed(3)
    width = width or max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        ids[row, where] = torch.randint(1, 30, (n,))
        mask[row, where] = 1
    return ids, mask


@torch.no_grad()
def naive_log_probs(model, tokens):
    """log p(next | prefix) after the beginning and after each token, one cell at a time."""
    weights = dict(model.model.lstm.named_parameters())
    embedding, size, layers = model.model.embed_tokens.weight, model.config.hidden_size, model.config.num_layers
    h, c = [torch.zeros(size)] * layers, [torch.zeros(size)] * layers
    rows = []
    for token in [model.config.bos_token_id, *tokens]:
        x = embedding[token]
        for layer in range(layers):
            gates = weights[f"weight_ih_l{layer}"] @ x + weights[f"bias_ih_l{layer}"]
            gates = gates + weights[f"weight_hh_l{layer}"] @ h[layer] + weights[f"bias_hh_l{layer}"]
            i, f, g, o = gates.chunk(4)
            c[layer] = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
            x = h[layer] = o.sigmoid() * c[layer].tanh()
        output = (model.projection[1].weight @ x + model.projection[1].bias).relu()
        rows.append((embedding @ output + model.lm_head.bias).log_softmax(-1))
    return torch.stack(rows)


def test_sizes_are_those_of_the_rnngs():
    with torch.device("meta"):
        small, large = (LSTMForCausalLM(LSTMConfig.from_preset(f"lstm-{size}")) for size in ("15m", "35m"))
    assert round(small.num_parameters() / 1e6, 1) == 15.1
    assert round(large.num_parameters() / 1e6, 1) == 35.3


@pytest.mark.parametrize("layers", [1, 3])
def test_values_are_those_of_the_definition(layers):
    model = tiny(num_layers=layers)
    ids, _ = ids_of(7)
    expected = naive_log_probs(model, ids[0].tolist())
    logits = model(ids).logits[0]
    torch.testing.assert_close(logits, expected[1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(7))
    taken = expected[torch.arange(7), ids[0]]
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.loss, -taken.mean())
    torch.testing.assert_close(output.joint_log_prob[0], taken.sum())
    assert output.logits is None and set(output.losses) == {"word"}
    assert torch.equal(output.losses["word"], output.loss) and not output.losses["word"].requires_grad


def test_later_tokens_change_nothing_before_them():
    model = tiny()
    ids, _ = ids_of(8)
    changed = ids.clone()
    changed[0, 5:] = torch.tensor([1, 2, 3])
    first, second = model(ids).logits, model(changed).logits
    assert torch.equal(first[:, :5], second[:, :5]) and not torch.equal(first[:, 5:], second[:, 5:])


@pytest.mark.parametrize("left", [False, True])
def test_padding_and_batching_change_nothing(left):
    model = tiny()
    lengths = (9, 4, 1)
    ids, mask = ids_of(*lengths, width=12, left=left)
    together = model(ids, attention_mask=mask, use_cache=True)
    scores = model(ids, attention_mask=mask, labels=ids).joint_log_prob
    for row in range(len(lengths)):
        own = ids[row][mask[row].bool()][None]
        alone = model(own, use_cache=True)
        torch.testing.assert_close(together.logits[row][mask[row].bool()], alone.logits[0])
        torch.testing.assert_close(scores[row], model(own, labels=own).joint_log_prob[0])
        for mine, other in zip(together.past_key_values.state, alone.past_key_values.state, strict=True):
            torch.testing.assert_close(mine[:, row], other[:, 0])
    assert torch.isfinite(together.logits).all()
    mean = -scores.sum() / sum(lengths)
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=ids).loss, mean)
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss, mean)


def test_padding_without_mask_is_seen():
    model = tiny()
    ids, mask = ids_of(5, 8)
    given, inferred = (model(ids, attention_mask=m, use_cache=True) for m in (mask, None))
    assert torch.equal(given.logits, inferred.logits)
    assert torch.equal(given.past_key_values.state[0], inferred.past_key_values.state[0])
    assert torch.equal(model(ids, labels=ids).loss, model(ids, attention_mask=mask, labels=ids).loss)


def test_columns_out_of_the_mask_do_not_exist():
    model = tiny()
    ids, _ = ids_of(6)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
    with_holes, without = model(ids, attention_mask=mask).logits, model(ids[:, mask[0] == 1]).logits
    torch.testing.assert_close(with_holes[:, mask[0] == 1], without)


@pytest.mark.parametrize("begin", [0, 4])
def test_leading_begin_token_is_the_beginning(begin):
    model = tiny(bos_token_id=begin)
    ids, _ = ids_of(6)
    ids[ids == 4] = 5
    with_begin = torch.cat([torch.full_like(ids[:, :1], begin), ids], 1)
    for mask in (None, torch.ones_like(with_begin)):
        mine = model(with_begin, attention_mask=mask).logits
        torch.testing.assert_close(mine[:, 1:], model(ids).logits)
        torch.testing.assert_close(mine[0], naive_log_probs(model, ids[0].tolist()), atol=1e-5, rtol=1e-5)
        labeled = model(with_begin, attention_mask=mask, labels=with_begin)
        torch.testing.assert_close(labeled.loss, model(ids, labels=ids).loss)


def test_labels_choose_what_counts():
    model = tiny()
    ids, _ = ids_of(8)
    log_probs = naive_log_probs(model, ids[0].tolist())[torch.arange(8), ids[0]]
    labels = ids.clone()
    labels[0, :5] = -100
    torch.testing.assert_close(model(ids, labels=labels).loss, -log_probs[5:].mean())
    shifted = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, -log_probs[1:].mean())
    with pytest.raises(ValueError, match="both"):
        model(ids, labels=ids, shift_labels=shifted)


def test_every_parameter_learns():
    model = tiny().train()
    ids, mask = ids_of(9, 4, 1)
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())
    model.zero_grad()
    nothing = model(ids, labels=torch.full_like(ids, -100))
    nothing.loss.backward()
    assert nothing.loss.item() == 0 and nothing.joint_log_prob.tolist() == [0.0, 0.0, 0.0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_gradients_are_those_of_the_logits():
    model = tiny()
    ids, _ = ids_of(9)
    logits = model(torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)).logits[0, :-1]
    (-logits[torch.arange(9), ids[0]].mean()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_dropout_in_training_only():
    model = tiny(dropout=0.5)
    ids, _ = ids_of(9)
    assert len({model(ids, labels=ids).loss.item() for _ in range(3)}) == 1
    assert len({model.train()(ids, labels=ids).loss.item() for _ in range(3)}) == 3


def test_logits_to_keep():
    model = tiny()
    ids, _ = ids_of(7)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])


class TestCache:
    @pytest.mark.parametrize("split", range(1, 7))
    def test_two_calls_are_one(self, split):
        model = tiny()
        ids, _ = ids_of(7)
        first = model(ids[:, :split], use_cache=True)
        second = model(ids[:, split:], past_key_values=first.past_key_values)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), model(ids).logits)
        assert second.past_key_values.get_seq_length() == 7

    @pytest.mark.parametrize("left", [False, True])
    def test_rows_of_unequal_length(self, left):
        # The second row holds no token in one of the two segments.
        model = tiny()
        ids, mask = ids_of(8, 3, 5, left=left)
        first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        for given in (mask, mask[:, 4:]):
            cache = RecurrentCache()
            cache.store(first.past_key_values.state, 4, batch_dim=1)
            second = model(ids[:, 4:], attention_mask=given, past_key_values=cache)
            both = torch.cat([first.logits, second.logits], 1)
            torch.testing.assert_close(both[mask == 1], model(ids, attention_mask=mask).logits[mask == 1])

    def test_training_in_segments(self):
        model = tiny(dropout=0.0).train()
        ids, _ = ids_of(8, 8)
        whole = model(ids, labels=ids).loss
        first = model(ids[:, :4], labels=ids[:, :4], use_cache=True)
        second = model(ids[:, 4:], labels=ids[:, 4:], past_key_values=first.past_key_values)
        torch.testing.assert_close((first.loss + second.loss) / 2, whole)
        assert not any(tensor.requires_grad for tensor in second.past_key_values.state)
        first.loss.backward()
        second.loss.backward()

    def test_rows_are_selected_and_repeated(self):
        model = tiny()
        ids, mask = ids_of(6, 3)
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        cache.reorder_cache(torch.tensor([3, 0]))
        following = torch.tensor([[7], [7]])
        mine = model(following, past_key_values=cache).logits[:, 0]
        for row, length in ((0, 3), (1, 6)):
            text = torch.cat([ids[1 - row, :length], following[0]])[None]
            torch.testing.assert_close(mine[row], model(text).logits[0, -1])
        with pytest.raises(ValueError, match="crop"):
            cache.crop(1)
        with pytest.raises(ValueError, match="2 rows and input_ids 1"):
            model(following[:1], past_key_values=cache)
        cache.reset()
        assert not cache.is_initialized and cache.batch_size == cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids[:1], past_key_values=cache).logits, model(ids[:1]).logits)

    def test_begin_token_inside_a_text_is_a_word(self):
        model = tiny()
        ids = torch.tensor([[5, 0, 7]])
        cache = model(ids[:, :1], use_cache=True).past_key_values
        rest = model(ids[:, 1:], past_key_values=cache).logits
        torch.testing.assert_close(rest, model(ids).logits[:, 1:])


class TestGenerate:
    MODES = ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5})

    @pytest.mark.parametrize("options", MODES)
    def test_cache_and_batches_change_nothing(self, options):
        model = tiny()
        ids, mask = ids_of(5, 2, left=True)

        def generate(ids, mask, **more):
            torch.manual_seed(1)
            return model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=None, **options, **more)

        batch = generate(ids, mask)
        assert torch.equal(batch, generate(ids, mask)) and torch.equal(batch, generate(ids, mask, use_cache=False))
        assert batch.shape == (2 * options.get("num_return_sequences", 1), 11)
        if "do_sample" not in options:
            count = len(batch) // 2
            assert torch.equal(generate(ids[1:, 3:], mask[1:, 3:])[:, 2:], batch[count:, 5:])

    def test_scores_are_log_probabilities(self):
        model = tiny()
        ids, _ = ids_of(4)
        result = model.generate(
            ids, num_beams=30, max_new_tokens=2, eos_token_id=None, length_penalty=0.0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        text = result.sequences
        labels = text.clone()
        labels[:, :4] = -100
        own = model(text, attention_mask=torch.ones_like(text), labels=labels).joint_log_prob
        torch.testing.assert_close(result.sequences_scores, own)
        first = model(ids).logits[0, -1]
        best = max(
            (first[a] + model(torch.cat([ids, torch.tensor([[a]])], 1), torch.ones(1, 5)).logits[0, -1].max()).item()
            for a in range(30)
        )
        assert own.item() == pytest.approx(best, abs=1e-5)

    def test_from_the_beginning(self):
        model = tiny()
        started = model.generate(torch.tensor([[0]]), max_new_tokens=5, eos_token_id=None)
        assert torch.equal(model.generate(max_new_tokens=5, eos_token_id=None), started)
        assert started[0, 1] == naive_log_probs(model, [])[0].argmax()

    def test_unknown_options_are_errors(self):
        with pytest.raises(ValueError, match="not_an_option"):
            tiny().generate(torch.tensor([[5]]), max_new_tokens=2, not_an_option=True)
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            tiny().generate(torch.tensor([[5]]), max_new_tokens=2, assistant_model=tiny())


def test_save_and_load_are_exact(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LSTMForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    ids, _ = ids_of(7)
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    before, after = model.config.to_dict(), loaded.config.to_dict()
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed <= {"architectures", "dtype", "_name_or_path", "transformers_version"}
    base = LSTMModel.from_pretrained(tmp_path).eval()
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_resize_embeddings():
    model = tiny()
    model.resize_token_embeddings(44)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.bias.shape == (44,) and model.config.vocab_size == 44
    ids = torch.tensor([[43, 7, 42]])
    assert model(ids).logits.shape == (1, 3, 44) and math.isfinite(model(ids, labels=ids).loss.item())


def test_fresh_parameters():
    sizes = {"vocab_size": 2000, "embedding_size": 64, "hidden_size": 100}
    model = tiny(**sizes)
    assert model.lm_head.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.model.lstm.weight_hh_l1.abs().max().item() == pytest.approx(0.1, rel=0.01)
    for parameter in tiny(**sizes, initializer_range=0.05).parameters():
        assert parameter.abs().max().item() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    model = tiny(dropout=0.0)
    ids, mask = ids_of(9, 4)
    reference = model(ids, attention_mask=mask, labels=ids).loss.item()
    if dtype == torch.float64:
        model = model.double()
        assert model(ids, attention_mask=mask, labels=ids).loss.item() == pytest.approx(reference, abs=1e-6)
        assert model(ids).logits.dtype == dtype
        return
    with torch.autocast("cpu", dtype=dtype):
        first = model.train()(ids[:, :5], attention_mask=mask[:, :5], labels=ids[:, :5], use_cache=True)
        second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
        loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(reference, rel=0.05)
    assert torch.isfinite(second.logits).all() and second.logits.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())
    half = tiny().to(dtype)
    assert half(ids, attention_mask=mask, use_cache=True).logits.dtype == torch.float32


@pytest.mark.gpu
def test_gpu_gives_the_same_numbers():
    model = tiny(dropout=0.0)
    ids, mask = ids_of(9, 4, 1, left=True)
    expected, loss = model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask, labels=ids).loss
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    output = model(ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(output.logits.cpu(), expected, atol=1e-4, rtol=1e-4)
    trained = model.train()(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(trained.loss.cpu(), loss, atol=1e-4, rtol=1e-4)
    trained.loss.backward()
    model.eval()
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2)
    assert generated.shape[0] == 3
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = model.train()(ids, attention_mask=mask, labels=ids).loss
    half.backward()
    assert half.item() == pytest.approx(loss.item(), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "integers"),
        ({"input_ids": torch.rand(2, 3)}, "integers"),
        ({"input_ids": torch.tensor([[7, 99]])}, "99"),
        ({"input_ids": torch.full((1, 4), 7), "attention_mask": torch.ones(1, 5)}, "attention_mask"),
        ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 3), 7)}, "labels"),
        ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 4), 30)}, "Label 30"),
        ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 4), 7), "logits_to_keep": 1}, "logits_to_keep"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny()(**arguments)
    with pytest.raises(TypeError, match="position_ids"):
        tiny()(torch.tensor([[5]]), position_ids=torch.tensor([[0]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"dropout": 1.0}, "dropout"),
        ({"initializer_range": 0.0}, "initializer_range"),
        ({"bos_token_id": None}, "bos_token_id is None"),
        ({"pad_token_id": 30}, "pad_token_id 30 is outside"),
    ],
)
def test_bad_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LSTMConfig(**{**TINY, **fields})


def test_unknown_preset():
    with pytest.raises(ValueError, match="lstm-15m"):
        LSTMConfig.from_preset("lstm-1m")


# ------------------------------------------------------------------------------------------------- Hub and tools
@pytest.fixture(scope="module")
def tokenizer():
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {name: "<pad>" for name in ("pad_token", "bos_token", "eos_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


@pytest.mark.parametrize("model_class", [LSTMForCausalLM, LSTMModel])
def test_hub_round_trip(model_class, tokenizer, tmp_path):
    folder = export_model(tiny(model_class), tokenizer, tmp_path / "lstm-tiny")
    assert check_complete(folder) == LSTMConfig().auto_map
    report = verify_export(folder)
    assert report.passed, report.table()
    names = {"files", "AutoConfig", "AutoTokenizer", "AutoModel", "AutoModelForCausalLM", "generate"}
    assert {check.name for check in report.checks} == names
    card = (folder / "README.md").read_text()
    assert "parse" not in card and "beam" not in card and "<!--" not in card
    code = card.split("```python\n")[1].split("```")[0].replace('"lstm-tiny"', f'"{folder}"')
    exec(compile(code, "README.md", "exec"), {"print": lambda *args: None})  # noqa: S102


@pytest.fixture(scope="module")
def own_scores(tokenizer):
    rows = [torch.tensor([tokenizer(sentence)["input_ids"]]) for sentence in SENTENCES]
    return [tiny()(ids, labels=ids).joint_log_prob.item() for ids in rows]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_gives_the_own_log_probabilities(tokenizer, own_scores, batch_size):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=tiny(), tokenizer=tokenizer, batch_size=batch_size)
    requests = [Instance("loglikelihood", {}, ("", sentence), x) for x, sentence in enumerate(SENTENCES)]
    assert [score for score, _ in lm.loglikelihood(requests)] == pytest.approx(own_scores, abs=1e-4)
    rolling = [Instance("loglikelihood_rolling", {}, (sentence,), x) for x, sentence in enumerate(SENTENCES)]
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(own_scores, abs=1e-4)


def test_minicons_gives_the_own_log_probabilities(tokenizer, own_scores):
    scorer = pytest.importorskip("minicons.scorer").IncrementalLMScorer(tiny(), "cpu", tokenizer=tokenizer)
    scores = scorer.sequence_score(SENTENCES, reduction=lambda x: x.sum(0).item(), bos_token=True)
    assert scores == pytest.approx(own_scores, abs=1e-4)


def test_pipeline_and_trainer(tokenizer, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = tiny(dropout=0.0)
    rows = [tokenizer(sentence)["input_ids"] for sentence in SENTENCES]

    def collate(batch):
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in batch], batch_first=True)
        return {"input_ids": padded, "labels": padded.masked_fill(padded == 0, -100)}

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=3, gradient_accumulation_steps=2,
        learning_rate=3e-2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=collate)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 3
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    results = generator(["the keys", "fruit"], max_new_tokens=3, do_sample=False, batch_size=2)
    assert [result[0]["generated_text"] for result in results][1].startswith("fruit")
