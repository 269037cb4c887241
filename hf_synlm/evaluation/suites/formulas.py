# SPDX-License-Identifier: Apache-2.0
"""Predictions of SyntaxGym test suites: a small language over the surprisals of regions.

    disjunction   = conjunction { "|" conjunction }
    conjunction   = comparison { "&" comparison }
    comparison    = sum [ ("<" | ">" | "=") sum ]
    sum           = term { ("+" | "-") term }
    term          = [ "-" ] ( region | number | "(" disjunction ")" | "[" disjunction "]" )
    region        = "(" (number | name | "*") ";" "%" condition "%" ")"

`(5;%ambig%)` is the surprisal of region 5 in the condition "ambig", `*` the sum of all regions. Operators of one line
above associate to the left. Truth values and numbers do not mix. "=" holds within 0.001 + 0.00001 |right side|.

The symbols are rewritten as a Python expression with names for regions and numbers. The module `ast` parses it, and
only the nodes of the grammar above are accepted; nothing is executed by Python itself.

Source: the format of cpllab/syntaxgym-core. There, "+" binds tighter than "-" (a - b + c is a - (b + c)), regions have
no names, and "|" is missing; none of the published suites depends on that.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from hf_synlm.data.text import errors_at

# Published formulas have a few dozen tokens. A file may hold anything, and deep formulas would exhaust the stack.
MOST_TOKENS = 300
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-3
Surprisals: TypeAlias = Mapping[tuple[str, int], float]
"""(condition, region number) -> surprisal."""
_TOKEN = re.compile(
    r"\s*(?:(?P<region>\(\s*(?P<place>[^;()\[\]%]+?)\s*;\s*%(?P<condition>[^%]+)%\s*\))"
    r"|(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)|(?P<symbol>[-+<>=&|()\[\]]))"
)
# Symbols that Python writes differently; "and" and "or" bind more loosely than comparisons, as "&" and "|" do here.
_IN_PYTHON = {"=": "==", "&": "and", "|": "or"}


Region: TypeAlias = tuple[str, int | None]
"""Condition and number of a region; None for all regions."""


def _about_equal(left: float, right: float) -> bool:
    return abs(left - right) <= ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(right)


_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.Eq: _about_equal,
}


class Formula:
    """A parsed prediction; ValueError for a text that is not a formula with a truth value. `names` are of regions."""

    def __init__(self, text: str, names: Mapping[str, int] = MappingProxyType({})) -> None:
        self.text, self.names = text, names
        self._operands: list[Region | float] = []  # regions and numbers, from left to right
        source = " ".join(self._symbols())
        try:
            self._tree = ast.parse(source, mode="eval").body
            is_truth = self._is_truth(self._tree)
        except SyntaxError as error:
            raise self._error(f"{error.msg}; +, -, <, >, =, & and | join regions and numbers") from error
        if not is_truth:
            raise self._error("it is a number, but a prediction compares numbers by <, > or =")

    def _error(self, problem: str) -> ValueError:
        shown = self.text if len(self.text) <= 200 else f"{self.text[:40]}..."
        return ValueError(f"formula {shown!r} cannot be read: {problem}")

    def _symbols(self) -> list[str]:
        """The formula in Python's symbols; the operand k is the name x<k>."""
        symbols: list[str] = []
        place = 0
        while rest := self.text[place:].strip():
            if len(symbols) == MOST_TOKENS:
                raise self._error(f"it is longer than {MOST_TOKENS} regions, numbers and operators")
            match = _TOKEN.match(self.text, place)
            if match is None:
                raise self._error(f"{rest[:12]!r} is unknown; a region is (number;%condition%), without % in its name")
            place = match.end()
            if match["symbol"]:
                symbols.append(_IN_PYTHON.get(match["symbol"], match["symbol"]))
                continue
            symbols.append(f"x{len(self._operands)}")
            is_region = match["region"] is not None
            self._operands.append(self._region(match) if is_region else float(match["number"]))
        return symbols

    def _is_truth(self, node: ast.expr) -> bool:
        """Whether a node is true or false rather than a number; ValueError for what the grammar does not have."""
        match node:
            case ast.Name():
                return False
            case ast.List(elts=[inside]):
                return self._is_truth(inside)
            case ast.BoolOp(values=sides):
                if not all(self._is_truth(side) for side in sides):
                    raise self._error("& and | join truth values, not numbers; add brackets")
                return True
            case ast.Compare(left=left, ops=[ast.Lt() | ast.Gt() | ast.Eq()], comparators=[right]):
                sides, is_truth = [left, right], True
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                sides, is_truth = [left, right], False
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                sides, is_truth = [operand], False
            case ast.Compare():
                raise self._error("comparisons do not chain; join two by &")
            case _:
                raise self._error("expected a region, a number or a bracket on each side of every operator")
        if any(self._is_truth(side) for side in sides):
            raise self._error("<, >, =, + and - join numbers, not truth values; add brackets")
        return is_truth

    def _region(self, match: re.Match[str]) -> Region:
        place = match["place"]
        if place != "*" and place not in self.names and not place.isdigit():
            raise self._error(f"region {place!r} is unknown: there are {', '.join(self.names) or 'no names'}")
        return match["condition"], None if place == "*" else self.names[place] if place in self.names else int(place)

    def regions(self) -> set[Region]:
        """What the formula reads."""
        return {operand for operand in self._operands if isinstance(operand, tuple)}

    def check(self, conditions: Mapping[str, set[int]]) -> None:
        """Raise ValueError unless all conditions and regions exist (`conditions` gives the numbers of regions)."""
        with errors_at(f"formula {self.text!r}"):
            for condition, number in self.regions():
                if condition not in conditions:
                    raise ValueError(f"no condition {condition!r}. There are {', '.join(conditions) or 'none'}")
                if number is not None and number not in conditions[condition]:
                    raise ValueError(f"no region {number} in {condition!r}, which has {sorted(conditions[condition])}")

    def __call__(self, surprisals: Surprisals) -> bool:
        """Whether the prediction holds for the surprisals of one item."""
        values = [
            operand if isinstance(operand, float) else _surprisal(*operand, surprisals) for operand in self._operands
        ]
        return bool(_evaluate(self._tree, values))


def _surprisal(condition: str, number: int | None, surprisals: Surprisals) -> float:
    if number is None:
        return sum(value for (own, _), value in surprisals.items() if own == condition)
    return surprisals[condition, number]


def _evaluate(node: ast.expr, values: list[float]) -> float:
    """Value of a node that `Formula` has checked."""
    match node:
        case ast.Name(id=name):
            return values[int(name[1:])]
        case ast.List(elts=[inside]):
            return _evaluate(inside, values)
        case ast.BoolOp(op=op, values=sides):
            truths = [_evaluate(side, values) for side in sides]
            return all(truths) if isinstance(op, ast.And) else any(truths)
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, values)
        case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
    raise AssertionError(node)
