# SPDX-License-Identifier: Apache-2.0
"""Configuration of probabilistic context-free grammars (Kim et al., ACL 2019; Yang et al., NAACL 2021, 2022)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.core.configuration_base import SyntacticConfig

GRAMMARS = ("dense", "tensor", "tensor_shared", "simple", "sparse")
# The published sizes, with the authors' vocabulary of the Penn Treebank.
PRESETS: dict[str, dict[str, Any]] = {
    "neural-pcfg": {},
    "compound-pcfg": {"latent_size": 64},
    "tn-pcfg": {"grammar": "tensor", "num_nonterminals": 250, "num_preterminals": 500, "rank": 500, "init": "default"},
    "rank-space-pcfg": {
        **{"grammar": "tensor_shared", "num_nonterminals": 4500, "num_preterminals": 9000, "rank": 1000},
        **{"symbol_size": 512, "init": "xavier_normal"},
    },
    "simple-pcfg": {"grammar": "simple", "num_nonterminals": 4096, "num_preterminals": 8192, "symbol_size": 512},
}


@strict
class PCFGConfig(SyntacticConfig):
    """Sizes of a PCFG: S -> A, A -> B C, X -> word, with nonterminals A and preterminals X.

    Sizes:
        vocab_size: number of token ids (V).
        grammar: how p(A -> B C) is computed: "dense", a table of all pairs of children (neural and compound PCFG);
            "tensor", of low rank, sum_k U[A, k] V[B, k] W[C, k] (TN-PCFG); "tensor_shared", the same where U, V and W
            share a projection and preterminals have one vector (rank space); "simple", L[B, A] R[C, A] (simple PCFG);
            "sparse", a list of rules with a number each (treebank PCFG).
        num_nonterminals, num_preterminals: number of symbols (Y, X).
        rank: rank of "tensor" and "tensor_shared" (r); None for the others.
        num_rules: number of rules of "sparse" (R); None for the others.
        symbols: names of nonterminals and preterminals; None: they have none. The labels of constituents, from the top
            down, or the tag of a preterminal stand before "(": "S VP(^ROOT)", "NP NN". A symbol without labels, "(NP
            DT)", was made by binarization, and is not a constituent of trees.
        symbol_size: width of the symbols' vectors and of the networks that read them (D).
        latent_size: width of the vector z of a sentence on which its grammar depends, as in the compound PCFG; 0 = all
            sentences have one grammar. Only "dense" and "simple".
        encoder_embedding_size, encoder_hidden_size: of the network that infers z: its word embeddings, and its LSTM in
            each direction.
        init: "xavier_uniform" or "xavier_normal" of all parameters with two dimensions, vectors of symbols and words
            included; "default" = as PyTorch's layers, N(0, 1) for the vectors.
    Next words of a grammar with z, which must not see the sentence:
        num_prior_samples: average over so many z from the prior; 1 = use the prior's mean.
        prior_seed: seed of these draws.
    Special tokens:
        bos_token_id, eos_token_id: stand around a sentence. The grammar has neither: a sentence ends when its tree is
            complete, and `logits` have the probability of this at the end token.
        pad_token_id: never a word.
        mask_special_tokens: preterminals give no probability to these three. False: they do, as in the authors'
            programs, so that the probabilities of next words sum to a little less than 1.
    Presets: "neural-pcfg", "compound-pcfg", "tn-pcfg", "rank-space-pcfg", "simple-pcfg".

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "pcfg"
    is_grammar = True
    presets = PRESETS
    model_classes = ("Model", "ForCausalLM")
    attribute_map = {"hidden_size": "symbol_size"}
    # Clients of transformers ask for it; a grammar has no layers.
    num_hidden_layers = 1

    vocab_size: int = 10004
    grammar: str = "dense"
    num_nonterminals: int = 30
    num_preterminals: int = 60
    rank: int | None = None
    num_rules: int | None = None
    symbols: list[str] | None = None
    symbol_size: int = 256
    latent_size: int = 0
    encoder_embedding_size: int = 512
    encoder_hidden_size: int = 512
    init: str = "xavier_uniform"

    num_prior_samples: int = 1
    prior_seed: int = 0
    mask_special_tokens: bool = True

    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | None = 3

    @property
    def is_compound(self) -> bool:
        """Whether every sentence has a grammar of its own."""
        return self.latent_size > 0

    @property
    def gives_labels(self) -> bool:  # type: ignore[override]
        """Whether trees have the labels of a treebank."""
        return self.symbols is not None

    @property
    def names(self) -> list[str]:
        """Names of all symbols; without `symbols` "NT0", "NT1", ..., and "T0", "T1", ..."""
        unnamed = [f"NT{a}" for a in range(self.num_nonterminals)] + [f"T{x}" for x in range(self.num_preterminals)]
        return self.symbols or unnamed

    @property
    def labels(self) -> list[list[str]]:
        """The labels that trees show for all symbols; see `symbols`."""
        return [name.partition("(")[0].split() for name in self.names]

    @property
    def parse_method(self) -> str:  # type: ignore[override]
        """See `SyntacticConfig`; where symbols have names, trees are those of a treebank."""
        return "mbr" if self.symbols is None else "viterbi"

    @property
    def silent_ids(self) -> list[int]:
        """Ids that no preterminal generates."""
        special = {self.pad_token_id, self.bos_token_id, self.eos_token_id} - {None}
        return sorted(special) if self.mask_special_tokens else []

    def validate_architecture(self) -> None:
        """Check that the fields are in range (called at construction and before saving)."""
        self.check_choices(grammar=GRAMMARS, init=("xavier_uniform", "xavier_normal", "default"))
        self.check_least(1, "vocab_size", "num_nonterminals", "num_preterminals", "symbol_size", "num_prior_samples")
        self.check_least(0, "latent_size", "prior_seed")
        if self.latent_size:
            self.check_least(1, "encoder_embedding_size", "encoder_hidden_size")
        has_rank = self.grammar in ("tensor", "tensor_shared")
        if has_rank != (self.rank is not None):
            need = "Set rank to a number" if has_rank else "Leave rank out"
            raise ValueError(f"rank is {self.rank}, but grammar is {self.grammar!r}. {need}.")
        if has_rank:
            self.check_least(1, "rank")
        if self.latent_size and self.grammar not in ("dense", "simple"):
            raise ValueError(
                f"latent_size {self.latent_size} needs grammar 'dense' or 'simple', but grammar is {self.grammar!r}."
            )
        most = self.num_nonterminals * (self.num_nonterminals + self.num_preterminals) ** 2
        if (self.grammar == "sparse") != (self.num_rules is not None) or not 1 <= (self.num_rules or 1) <= most:
            need = f"Set num_rules to 1 to {most}" if self.grammar == "sparse" else "Leave num_rules out"
            raise ValueError(f"num_rules is {self.num_rules}, but grammar is {self.grammar!r}. {need}.")
        if self.symbols is not None and len(self.symbols) != self.num_nonterminals + self.num_preterminals:
            raise ValueError(f"{len(self.symbols)} symbols have names. Name all symbols (nonterminals first), or none.")
        if len(self.silent_ids) >= self.vocab_size:
            raise ValueError(f"vocab_size is {self.vocab_size}, which leaves no word beside the special tokens.")
