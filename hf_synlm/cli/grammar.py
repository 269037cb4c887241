# SPDX-License-Identifier: Apache-2.0
"""`synlm grammar`: the rules that a PCFG has learned."""

import dataclasses
import json

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import option


def grammar(
    model: options.ModelName,
    rules: int = option("Rules to show per nonterminal, and start symbols to show.", default=5, min=1),
    words: int = option("Words to show per preterminal.", default=8, min=1),
    nonterminals: int = option("How many nonterminals, most used first.", default=30, min=1),
    preterminals: int = option("How many preterminals, most used first.", default=60, min=1),
    style: options.ReportFormat = "table",
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show the likely rules and words of a PCFG.

    Symbols have the names that `synlm parse --method viterbi` prints. NT3 is a nonterminal. T17 is a preterminal, shown
    with its likeliest words. Each rule has its probability given the parent. Symbols are sorted by their mean number of
    uses in a derivation. Growth is the number of nonterminals in a deep level of a derivation, divided by the number in
    the level above. If growth is 1 or more, derivations may never end. Then uses are counted only in the first 20
    levels. For a compound grammar, z is 0, the mean of the prior.

    Examples:
        synlm grammar runs/pcfg
        synlm grammar runs/pcfg --nonterminals 12
        synlm grammar runs/pcfg --rules 100 --words 100 --format json > grammar.json
    """
    from hf_synlm.hub.loading import load_pretrained
    from hf_synlm.viz.grammar import grammar_to_text, read_grammar

    outputs.hide_bars_of_weights()
    loaded, tokenizer = load_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    found = read_grammar(
        loaded,
        tokenizer,
        num_rules=rules,
        num_words=words,
        num_nonterminals=nonterminals,
        num_preterminals=preterminals,
    )
    if loaded.config.is_compound:
        outputs.say("every sentence has a grammar of its own; this is the grammar for z = 0, the mean of the prior")
    if style == "json":
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False))
    else:
        typer.echo(grammar_to_text(found))
