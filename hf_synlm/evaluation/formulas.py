"""Predictions of SyntaxGym test suites: a small language over the surprisals of regions.

    disjunction   = conjunction { "|" conjunction }
    conjunction   = comparison { "&" comparison }
    comparison    = sum [ ("<" | ">" | "=") sum ]
    sum           = term { ("+" | "-") term }
    term          = [ "-" ] ( region | number | "(" disjunction ")" | "[" disjunction "]" )
    region        = "(" (number | name | "*") ";" "%" condition "%" ")"

`(5;%ambig%)` is the surprisal of region 5 in the condition "ambig", `*` the sum of all regions. Operators of one line
above associate to the left; truth values and numbers do not mix. "=" holds within 0.001 + 0.00001 |right side|.

Source: the format of cpllab/syntaxgym-core. There, "+" binds tighter than "-" (a - b + c is a - (b + c)), regions have
no names, and "|" is missing; none of the published suites depends on that.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

# Published formulas have a few dozen; a file may hold anything, and deep ones would exhaust the stack.
MOST_TOKENS = 300
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-3
Value: TypeAlias = float | bool
Surprisals: TypeAlias = Mapping[tuple[str, int], float]
"""(condition, region number) -> surprisal."""
_TOKEN = re.compile(
    r"\s*(?:(?P<region>\(\s*(?P<place>[^;()\[\]%]+?)\s*;\s*%(?P<condition>[^%]+)%\s*\))"
    r"|(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)|(?P<symbol>[-+<>=&|()\[\]]))"
)


@dataclass(frozen=True)
class Region:
    """The surprisal of a region in a condition."""

    place: str
    """Number, name, or "*" for all."""
    condition: str


@dataclass(frozen=True)
class Number:
    """A number."""

    value: float


@dataclass(frozen=True)
class Operation:
    """An operator with what stands on its left and right side."""

    symbol: str
    left: "Expression"
    right: "Expression"


Expression: TypeAlias = Region | Number | Operation
_LEVELS = (("|",), ("&",), ("<", ">", "="), ("+", "-"))
_APPLY: dict[str, Callable[[float, float], Value]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "<": lambda left, right: left < right,
    ">": lambda left, right: left > right,
    "=": lambda left, right: abs(left - right) <= ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(right),
    "&": lambda left, right: bool(left and right),
    "|": lambda left, right: bool(left or right),
}


class Formula:
    """A parsed prediction.

    Args:
        text: the formula.

    Raises:
        ValueError: the text is no formula that is true or false; the message points at the place.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = _tokens(text)
        self._place = 0
        try:
            self.expression = self._level(0)
        except RecursionError as error:
            raise ValueError(f"formula {text[:40]!r}...: its brackets are nested too deep") from error
        if self._place < len(self._tokens):
            raise self._error("this cannot follow what is before it")
        if not _is_truth(self.expression, text):
            raise ValueError(f"formula {text!r} is a number: a prediction compares numbers by <, > or =")

    def _peek(self) -> str | None:
        if self._place >= len(self._tokens):
            return None
        item = self._tokens[self._place][0]
        return item if isinstance(item, str) else None

    def _error(self, problem: str) -> ValueError:
        at = self._tokens[self._place][1] if self._place < len(self._tokens) else len(self.text)
        return ValueError(f"formula {self.text!r}, at character {at + 1} ({self.text[at : at + 12]!r}): {problem}")

    def _level(self, level: int) -> Expression:
        """Parse operators of the level and of all that bind tighter."""
        if level == len(_LEVELS):
            return self._term()
        left = self._level(level + 1)
        while (symbol := self._peek()) is not None and symbol in _LEVELS[level]:
            self._place += 1
            left = Operation(symbol, left, self._level(level + 1))
            if symbol in _LEVELS[2] and self._peek() in _LEVELS[2]:
                raise self._error("comparisons do not chain; join two by &")
        return left

    def _term(self) -> Expression:
        if self._place >= len(self._tokens):
            raise self._error("it ends where a region, a number or a bracket should be")
        item = self._tokens[self._place][0]
        self._place += 1
        if not isinstance(item, str):
            return item
        if item == "-":
            return Operation("-", Number(0.0), self._term())
        if item not in "([":
            self._place -= 1
            raise self._error("a region, a number or a bracket should stand here")
        inside = self._level(0)
        if self._peek() != (")" if item == "(" else "]"):
            raise self._error(f"the bracket {item!r} is not closed here")
        self._place += 1
        return inside

    def regions(self) -> list[Region]:
        """All regions of the formula from left to right."""
        return _regions(self.expression)

    def places(self, names: Mapping[str, int]) -> set[tuple[str, int | None]]:
        """What the formula reads: conditions with numbers of regions, None for all regions."""
        return {(region.condition, _number(region.place, names)) for region in self.regions()}

    def check(self, conditions: Mapping[str, set[int]], names: Mapping[str, int]) -> None:
        """Check that the formula speaks of conditions and regions that exist.

        Args:
            conditions: condition -> numbers of its regions.
            names: names of regions -> numbers.

        Raises:
            ValueError: it does not.
        """
        for region in self.regions():
            if region.condition not in conditions:
                raise ValueError(
                    f"formula {self.text!r} speaks of the condition {region.condition!r}; there are "
                    f"{', '.join(conditions)}"
                )
            number = _number(region.place, names)
            if number is not None and number not in conditions[region.condition]:
                raise ValueError(
                    f"formula {self.text!r} speaks of region {region.place!r}; condition {region.condition!r} has the "
                    f"regions {sorted(conditions[region.condition])}"
                )

    def __call__(self, surprisals: Surprisals, names: Mapping[str, int] | None = None) -> bool:
        """Whether the prediction holds for the surprisals of one item."""
        return bool(_evaluate(self.expression, surprisals, names or {}))


def _tokens(text: str) -> list[tuple[str | Region | Number, int]]:
    """Tokens with their places."""
    found: list[tuple[str | Region | Number, int]] = []
    place = 0
    while text[place:].strip():
        if len(found) == MOST_TOKENS:
            raise ValueError(f"formula {text[:40]!r}... is longer than {MOST_TOKENS} regions, numbers and operators")
        match = _TOKEN.match(text, place)
        if match is None:
            place += len(text[place:]) - len(text[place:].lstrip())
            raise ValueError(f"formula {text!r}, at character {place + 1}: {text[place : place + 12]!r} is unknown")
        start = place + len(match.group()) - len(match.group().lstrip())
        if match["region"]:
            found.append((Region(match["place"], match["condition"]), start))
        elif match["number"]:
            found.append((Number(float(match["number"])), start))
        else:
            found.append((match["symbol"], start))
        place = match.end()
    return found


def _regions(expression: Expression) -> list[Region]:
    if isinstance(expression, Operation):
        return _regions(expression.left) + _regions(expression.right)
    return [expression] if isinstance(expression, Region) else []


def _is_truth(expression: Expression, text: str) -> bool:
    """Whether an expression is true or false rather than a number; ValueError where they are mixed."""
    if not isinstance(expression, Operation):
        return False
    sides = _is_truth(expression.left, text), _is_truth(expression.right, text)
    wanted = expression.symbol in "&|"
    if sides != (wanted, wanted):
        kinds = "truth values" if wanted else "numbers"
        raise ValueError(
            f"formula {text!r}: {expression.symbol!r} joins {kinds}, and gets something else; add brackets"
        )
    return expression.symbol in "&|<>="


def _number(place: str, names: Mapping[str, int]) -> int | None:
    """Number of a region, None for "*"."""
    if place == "*":
        return None
    if place in names:
        return names[place]
    if place.isdigit():
        return int(place)
    raise ValueError(f"region {place!r} is unknown: there are {', '.join(names) or 'no names'}")


def _evaluate(expression: Expression, surprisals: Surprisals, names: Mapping[str, int]) -> Value:
    if isinstance(expression, Number):
        return expression.value
    if isinstance(expression, Region):
        number = _number(expression.place, names)
        if number is None:
            return sum(value for (condition, _), value in surprisals.items() if condition == expression.condition)
        return surprisals[expression.condition, number]
    sides = (_evaluate(side, surprisals, names) for side in (expression.left, expression.right))
    return _APPLY[expression.symbol](*sides)
