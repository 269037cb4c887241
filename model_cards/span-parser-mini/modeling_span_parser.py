# SPDX-License-Identifier: Apache-2.0
"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

from hf_synlm.models.span_parser.modeling_span_parser import SpanParserForTokenClassification

__all__ = ["SpanParserForTokenClassification"]
