"""Classes of unknown words as the authors of RNNG find them (`berkeley_unk_conv`, `berkeley_unk_conv2` of utils.py)."""

import re
import unicodedata

ENDINGS = {
    "ing": "ing", "ed": "ed", "ly": "ly", "s": "s", "est": "est", "er": "ER", "ion": "ion", "ory": "ory"
}  # fmt: skip
ENDINGS_2 = ("ed", "ing", "ion", "er", "est", "ly", "ity", "y", "al")


def berkeley_class(word: str) -> str:
    """The class of a word by the rule "berkeley"."""
    name = "cunk" if unicodedata.category(word[0]) == "Lu" else "unk"
    added = ""
    if word[0].isdecimal() and word[-1].isdecimal():
        added = "n"
    elif len(word) > 3:
        added = next((added for ending, added in ENDINGS.items() if word.endswith(ending)), "")
        if not added and word.startswith("un"):
            name = "un" + name
        elif not added and word.endswith("al"):
            added = "al"
        elif not added:
            added = next((character for character in word[:-1] if character in "-."), "")
    return f"<{name}{added}>"


def berkeley2_class(word: str) -> str:
    """The class of a word by the rule "berkeley2"."""
    categories = [unicodedata.category(character) for character in word]
    num_capitals, has_digit, has_dash = categories.count("Lu"), "Nd" in categories, "-" in word
    name = "UNK"
    if categories[0] == "Lu":
        name += "-INITC" if num_capitals == 1 else "-CAPS"
    elif num_capitals and not categories[0].startswith("L"):
        name += "-CAPS"
    elif "Ll" in categories:
        name += "-LC"
    name += "-NUM" * has_digit + "-DASH" * has_dash
    if word[-1] in "sS" and len(word) >= 3:
        name += "-s" * (word[-2] not in "siuSIU")
    elif len(word) >= 5 and not has_dash and not (has_digit and num_capitals):
        name += next((f"-{ending}" for ending in ENDINGS_2 if re.search(any_case(ending) + r"\Z", word)), "")
    return name


def any_case(text: str) -> str:
    """A regular expression for ASCII letters in both cases, and no other character (the long s is no s)."""
    return "".join(f"[{letter}{letter.upper()}]" for letter in text)


UNKNOWN_CLASSES = {"single": lambda word: "<unk>", "berkeley": berkeley_class, "berkeley2": berkeley2_class}
