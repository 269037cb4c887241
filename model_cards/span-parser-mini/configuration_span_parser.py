# SPDX-License-Identifier: Apache-2.0
"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

try:
    from hf_synlm.models.span_parser.configuration_span_parser import SpanParserConfig
except ImportError as error:
    message = "this folder needs hf_synlm: `pip install .` in its checkout. `synlm export` makes one that needs nothing"
    raise ImportError(message) from error

__all__ = ["SpanParserConfig"]
