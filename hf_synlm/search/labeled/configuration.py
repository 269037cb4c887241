# SPDX-License-Identifier: Apache-2.0
"""Base of the configurations of RNNG and Tree LM: labels of nonterminals, and the search."""

from collections.abc import Sequence
from typing import Any

from hf_synlm.core.configuration_base import SyntacticConfig
from hf_synlm.trees.transitions import TransitionSystem

LOSS_NORMALIZATIONS = ("batch", "sum", "action", "token")
NORMALIZATIONS = ("search", "train")

# The constituent labels of the Penn Treebank.
PTB_NONTERMINALS = (
    "ADJP ADVP CONJP FRAG INTJ LST NAC NP NX PP PRN PRT QP RRC S SBAR SBARQ SINV SQ UCP VP WHADJP WHADVP WHNP WHPP X"
).split()


def check_labels(nonterminals: Sequence[str]) -> None:
    """Raise ValueError unless the labels of nonterminals are distinct words without brackets, at least one."""
    if not nonterminals or len(set(nonterminals)) < len(nonterminals):
        raise ValueError(f"nonterminals are {nonterminals}. Give at least one label, and each label only once.")
    for label in nonterminals:
        if not label or set(label) & set("() \t\n"):
            raise ValueError(f"The nonterminal {label!r} is empty or holds brackets or white space. Rename it.")


class LabeledTreeConfig(SyntacticConfig):
    """Base of the configurations of models with labeled trees: labels, search and special tokens.

    Fields:
        nonterminals: labels; action ids follow their order.
        subwords: tokens are pieces of words, and the model holds which tokens end a word (`word_final`). All pieces
            of a word are children of its parent, and nothing but SHIFT is allowed between them.
        loss_normalization: the summed loss is divided by the number of sentences ("batch"), by 1 ("sum"), by the number
            of actions ("action"; Tree LM: the mean over the tokens of the linearized tree, as in the paper), or of
            tokens ("token").
        objective_weight: weight of the negative log-probability of texts and trees beside the loss of a classifier; 0:
            it is not computed.
        scoring_num_beams: derivations kept after each word, of `forward(...).logits` and by default of `parse`.
        action_beam_size: derivations kept after each action inside a word.
        fast_track_size: derivations that reach the next word although they are not among the best.
        search_order: order of the states inside a word. "steps" takes all of them one action further at a time, as
            RNNG's authors do; "best_first" executes the best ones first and needs fewer (`fast_track_size` has no
            effect). None = "best_first" for a Tree LM on a backbone, else "steps".
        search_slack: "best_first" drops a state if a word would have to be more than exp(search_slack) times as
            probable after it as after the best state; None = drop none.
        normalization: "search" spreads the probability of illegal actions and of the padding word over all legal ones,
            as RNNG's authors do. "train" does not, so that scores are those of the training loss.
        output_marginal_logits: in evaluation mode, return `logits` also with actions, so that Trainer's `predict` and
            `compute_metrics` see them. They cost a search per batch, many times the loss.
        max_open_nonterminals: maximum number of constituents that are open at once.
    """

    sentence_end = "tree"
    searches = gives_labels = True
    tree_codec = "labeled"

    nonterminals: list[str] | tuple[str, ...] | None = None
    subwords: bool = False
    loss_normalization: str = "batch"
    objective_weight: float | int = 0
    scoring_num_beams: int = 10
    action_beam_size: int = 100
    fast_track_size: int = 1
    search_order: str | None = None
    search_slack: float | int | None = None
    normalization: str = "search"
    output_marginal_logits: bool = False
    max_open_nonterminals: int = 100
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int = 0
    eos_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any):
        self.nonterminals = list(PTB_NONTERMINALS if self.nonterminals is None else self.nonterminals)
        super().__post_init__(**kwargs)

    @property
    def system(self) -> TransitionSystem:
        """What the ids of actions mean."""
        return TransitionSystem(self.transition_system, len(self.nonterminals))

    @property
    def searches_best_first(self) -> bool:
        """Whether the search executes the best states of a word first."""
        return self.search_order == "best_first"

    def check_search(self) -> None:
        """Raise ValueError for bad fields of this class, and a bad dropout."""
        self.check_least(1, "scoring_num_beams", "action_beam_size", "max_open_nonterminals")
        self.check_least(0, "fast_track_size")
        self.check_finite("objective_weight")
        self.check_choices(loss_normalization=LOSS_NORMALIZATIONS, normalization=NORMALIZATIONS)
        self.check_choices(search_order=(None, "steps", "best_first"))
        if self.search_slack is not None and not self.search_slack > 0:
            raise ValueError(f"search_slack is {self.search_slack} nats. Choose a positive number, or None.")
        check_labels(self.nonterminals)
