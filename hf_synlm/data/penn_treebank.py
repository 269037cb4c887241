r"""The Penn Treebank as a language model corpus that keeps its trees.

Two versions are in use, and this module makes both from the same trees.

**PTB-Concat** (Mikolov et al. 2010): lower case, numbers as N, no punctuation, 10,000 types, one sentence after the
other with `</s>` in between. With the trees of its sentences it is called PTB-Concat-Syn (Du et al. 2020):
`to_ptb_concat`, then `word_tokenizer(..., vocab_size=10_001, end_token=True)`, the 10,000 types and padding.

**PTB-Sepsent** (Dyer et al. 2016): sentences one by one, with punctuation and case; words that occur once in training
are replaced by classes. `read_treebank` gives its sentences, and
`word_tokenizer(..., unknown="berkeley2", min_count=2, end_token=True)` its vocabulary.

The rules are those of Du et al. (2020), appendix A.3, with three differences that make the result the published text.
Of the 3,914 sentences of the 10 % sample of the treebank in NLTK, they bring 3,907 to the form that stands in Mikolov's
training file, token for token (79 % by the appendix to the letter; its last step is to correct the rest by hand).

* Not `$` but `%` becomes N: `$` is a word of the published text, `%` is not.
* Numbers are all tokens of digits and the characters `. , : - \ /`, such as 1,200, 3\/4 and 1:30.
* The apostrophe goes where it closes a quotation (tag `''`).
"""

import dataclasses
import re

from hf_synlm.data.treebank import TreebankSentence

_NUMBER = re.compile(r"(?=.*[0-9])[0-9.,:\-\\/]+|%")
_DROPPED_WORDS = frozenset(
    "`` '' , . : ; - ? ! ¨ ^ \\ \\\\ | ~ -lrb- -rrb- -lcb- -rcb- ( ) [ ] { } < > -- ... `".split()
)
_DROPPED_PAIRS = frozenset((("wa", "NNP"), ("'", "''")))


def to_ptb_concat(sentence: TreebankSentence) -> TreebankSentence | None:
    """Bring a sentence of the Penn Treebank to the form of PTB-Concat, with its tree.

    Words become lower case and numbers N, punctuation goes, and with it the constituents that held nothing else. What
    remains to do is the vocabulary: words that are not in it become `<unk>` when they are encoded.

    Source: Du et al. (2020), appendix A.3, steps 1 to 6; differences at the top of this module.

    Args:
        sentence: of `read_treebank`, which drops empty elements and function tags.

    Returns:
        The sentence, its constituents counted in the words that are left; `None` if none is.
    """
    words = [word.lower() for word in sentence.words]
    words = ["N" if _NUMBER.fullmatch(word) else word for word in words]
    keep = [
        word not in _DROPPED_WORDS and (word, tag) not in _DROPPED_PAIRS
        for word, tag in zip(words, sentence.tags, strict=True)
    ]
    if not any(keep):
        return None
    return dataclasses.replace(sentence, words=tuple(words)).select_words(keep)
