"""Words of a treebank as ordinary text, and the pieces of it."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from hf_synlm.data.collate import encode_joined, encode_words
from hf_synlm.data.dependencies import read_conllu
from hf_synlm.data.gold_trees import encode_trees
from hf_synlm.data.punctuation import spell, stands_joined
from hf_synlm.data.text import NATURAL
from hf_synlm.data.tokenizers import begin_token_id
from hf_synlm.data.treebank import parse_treebank, read_treebank
from hf_synlm.trees.codecs import LabeledCodec
from tests.helpers.refusals import refused

TEXT = "It's late (again). I don't know; you cannot say \"no\", can you? The dog's barking."


def natural(sentence: str, tags: str = "") -> str:
    words = sentence.split()
    marks = stands_joined(words, tags.split())
    return "".join(spell(word) if joined else f" {spell(word)}" for word, joined in zip(words, marks, strict=True))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with "cannot" and ")." in one piece, as the decoders of the Hub have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 9, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


SPELLED = [
    ("It 's late -LRB- again -RRB- .", "", "It's late (again)."),
    ("`` I do n't know , '' he said .", "", '"I don\'t know," he said.'),
    ('He said " no " .', "", 'He said "no".'),
    ("the girls ' toys can not break -LRB-s-RRB-", "", "the girls' toys cannot break (s)"),
    ("well - known words - all of them", "RB HYPH VBN NNS : DT IN PRP", "well-known words - all of them"),
    ("pages 3 – 5 of 1\\/2 -- yes", "", "pages 3–5 of 1/2--yes"),
    ("$ 5 and / or 10 %", "", "$5 and/or 10%"),
    ("' Yes ' , he said", "`` UH '' , PRP VBD", "'Yes', he said"),
    (". . .", "", "..."),
]


@pytest.mark.parametrize(("sentence", "tags", "expected"), SPELLED)
def test_treebank_words_become_text(sentence, tags, expected):
    assert natural(sentence, tags) == expected


def test_a_treebank_and_a_text_meet_in_the_same_pieces(tokenizer):
    words = "It 's late -LRB- again -RRB- .".split()
    ids, ends = encode_words(tokenizer, words, NATURAL)
    assert tokenizer.decode(ids) == "It's late (again)." and sum(ends) == len(words) and ends[-1]
    # The pieces are those of the text, but for `).`, of which each word has its own.
    text = tokenizer("It's late (again).")["input_ids"]
    assert text[:4] == ids[:4] and len(ids) - len(text) == 1


def test_a_piece_belongs_to_the_word_in_which_it_begins(tokenizer):
    # `n't` is cut into ` don` and `'t`; ` cannot` is one piece, so its words are cut alone.
    [(ids, owners)] = encode_joined(tokenizer, [["I", "do", "n't", "can", "not"]], [[True, False, True, False, True]])
    assert tokenizer.decode(ids) == "I don't cannot"
    pieces = ["".join(tokenizer.decode(t) for t, k in zip(ids, owners, strict=True) if k == word) for word in range(5)]
    assert pieces == ["I", " don", "'t", " can", "not"]
    assert encode_joined(tokenizer, [[]], [[]]) == [([], [])] and encode_joined(tokenizer, [], []) == []


def test_text_that_looks_like_a_special_token_is_text(tokenizer):
    ids, _ = encode_words(tokenizer, ["a", "<|endoftext|>"], NATURAL)
    assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids) == "a <|endoftext|>"


def test_a_tokenizer_that_puts_spaces_before_texts_is_refused(tokenizer):
    spaced = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    refused("puts a space", encode_words, PreTrainedTokenizerFast(tokenizer_object=spaced), ["can", "not"], NATURAL)


def test_trees_are_encoded_as_text(tokenizer):
    (tree,) = parse_treebank(["(S (NP (PRP It)) (VP (VBZ 's) (ADJP (JJ late))) (. .))"])
    codec = LabeledCodec("top_down", ("ADJP", "NP", "S", "VP"))
    (row,) = encode_trees([tree], tokenizer, codec, NATURAL)
    assert tokenizer.decode(row["input_ids"]) == "It's late." and sum(row["word_ends"]) == 4
    (plain,) = encode_trees([tree], tokenizer, codec)
    assert tokenizer.decode(plain["input_ids"]) == "It 's late ."


def test_conllu_says_where_spaces_are(tokenizer, tmp_path):
    rows = [
        "1-2\tcannot\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No",
        "1\tcan\t_\tAUX\t_\t_\t4\taux\t_\t_",
        "2\tnot\t_\tPART\t_\t_\t4\tadvmod\t_\t_",
        "3\t,\t_\tPUNCT\t_\t_\t4\tpunct\t_\tSpaceAfter=No",
        "4\tgo\t_\tVERB\t_\t_\t0\troot\t_\t_",
        "5\t.\t_\tPUNCT\t_\t_\t4\tpunct\t_\t_",
    ]
    path = tmp_path / "a.conllu"
    path.write_text("\n".join(rows) + "\n\n")
    (sentence,) = read_conllu(path, "syntactic")
    assert sentence.spaces == (False, False, False, True, True)
    (tree,) = read_treebank(path, dependencies={"tokens": "syntactic"})
    assert tree.joined == (True, True, True, True, False)
    (row,) = encode_trees([tree], tokenizer, LabeledCodec("top_down", ("VERBP",)), NATURAL)
    assert tokenizer.decode(row["input_ids"]) == "cannot,go ."
    # A word that loses the mark before it has a space.
    assert tree.select_words([True, True, False, True, True]).joined == (True, True, False, False)
    (bare,) = read_treebank(path, without_punctuation=True, dependencies={"tokens": "syntactic"})
    assert bare.words == ("can", "not", "go") and bare.joined == (True, True, False)
    path.write_text("\n".join(rows).replace("SpaceAfter=No", "_") + "\n\n")
    (silent,) = read_treebank(path)
    assert silent.joined is None


def test_a_mark_of_turns_begins_no_text(tokenizer):
    assert begin_token_id(tokenizer) == tokenizer.eos_token_id
    marks = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    marks.add_special_tokens({"bos_token": AddedToken("<s>"), "eos_token": "</s>"})
    assert begin_token_id(marks) == marks.bos_token_id
    marks.chat_template = "{{ bos_token }}{% for message in messages %}[I]{{ message['content'] }}{% endfor %}"
    assert begin_token_id(marks) == marks.bos_token_id
    marks.chat_template = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    assert begin_token_id(marks) == marks.convert_tokens_to_ids("<|endoftext|>")
