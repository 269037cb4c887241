"""`synlm evaluate perplexity`."""

from hf_synlm.cli import options
from hf_synlm.evaluation.perplexity import evaluate_perplexity
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.text_items import read_items


def command(
    texts: options.Texts,
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    context: options.ContextOption = "sentence",
    file_format: options.FileFormat = None,
    text_column: options.TextColumn = "sentence",
) -> None:
    """Perplexity over tokens and over words, without and with the ends of sentences.

    The result names estimator, beam and what the end of a sentence counts: an end token, or for GPST and RNNG the
    closing of the trees. Compare models with different tokenizers by word_perplexity.

    Example: synlm evaluate perplexity valid.txt --model runs/gpst_tiny/model --estimator stepwise --out ppl.json
    """
    items = read_items(texts, kind=file_format, text_column=text_column)
    result = evaluate_perplexity(
        scoring.scorer(model),
        items,
        context=context,
        data={"files": describe_files([texts])},
        options={"seed": scoring.seed},
    )
    options.report(result, out)
