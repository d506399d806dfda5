"""Exact arithmetic on what a model writes: a small parser of our own, nothing is evaluated as code."""

import re
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from fractions import Fraction
from typing import Annotated, NamedTuple

from msgspec import Meta

from tools.errors import ToolError
from tools.schema import tool

MAX_EXPRESSION_CHARS = 1_000
MAX_NESTING = 50
MAX_BITS = 4_096  # of a numerator or denominator; about 1,200 digits
_SIGNIFICANT_DIGITS = 30  # of a result that has no end, such as 1/3

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,4})?)|(?P<name>[A-Za-z]+)"
    r"|(?P<symbol>\*\*|//|[-+*/%^(),]))"
)


@tool(label="Calculator", idempotent=True)
async def calculate(
    expression: Annotated[
        str, Meta(max_length=MAX_EXPRESSION_CHARS, description="Such as (12.5 + 3) * 4, 2^10 or sqrt(2).")
    ],
) -> str:
    """Works out an arithmetic expression exactly.

    Knows + - * / // % ^ (or **), parentheses, pi, e, and the functions sqrt, abs, round, min and max.
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression; roots, pi and e are exact to 30 digits.

    Raises: ToolError with a text for the model: what stands where, a division by zero, too large a number.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"The expression is longer than {MAX_EXPRESSION_CHARS} characters.")
    parser = _Parser(list(_tokens(expression)))
    value = parser.sum()
    parser.expect_end()
    return value


def format_number(value: Fraction) -> str:
    """All digits where they end, else 30 of them."""
    if value.denominator == 1:
        return str(value.numerator)
    reduced = value.denominator
    for prime in (2, 5):
        while reduced % prime == 0:
            reduced //= prime
    digits = _SIGNIFICANT_DIGITS if reduced != 1 else MAX_BITS
    quotient = Context(prec=digits).divide(Decimal(value.numerator), Decimal(value.denominator))
    return format(quotient, "f") if quotient.adjusted() > -_SIGNIFICANT_DIGITS else str(quotient)


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def _tokens(expression: str) -> Iterator[_Token]:
    at = 0
    while expression[at:].strip():
        match = _TOKEN.match(expression, at)
        if match is None or match.lastgroup is None:
            rest = expression[at:].lstrip()
            place = len(expression) - len(rest) + 1
            raise ToolError(f"Cannot read {rest[0]!r} at character {place} of the expression.")
        yield _Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup) + 1)
        at = match.end()
    yield _Token("end", "the end", len(expression) + 1)


class _Parser:
    """Recursive descent; `_nesting` bounds the recursion."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._nesting = 0

    def sum(self) -> Fraction:
        value = self._product()
        while symbol := self._take("+", "-"):
            right = self._product()
            value = _bounded(value + right if symbol == "+" else value - right)
        return value

    def expect_end(self) -> None:
        if self._tokens[self._at].kind != "end":
            raise self._unexpected()

    def _product(self) -> Fraction:
        value = self._signed()
        while symbol := self._take("*", "/", "//", "%"):
            value = _bounded(_PRODUCTS[symbol](value, self._signed()))
        return value

    def _signed(self) -> Fraction:
        sign = 1
        while symbol := self._take("+", "-"):
            sign = -sign if symbol == "-" else sign
        return sign * self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._take("^", "**"):
            return base
        self._enter()
        exponent = self._signed()
        self._nesting -= 1
        return _power(base, exponent)

    def _atom(self) -> Fraction:
        token = self._tokens[self._at]
        if token.kind == "end":
            raise self._unexpected()
        self._at += 1
        if token.kind == "number":
            return _bounded(_number(token.text))
        if token.kind == "name":
            return self._named(token)
        if token.text != "(":
            self._at -= 1
            raise self._unexpected()
        [value] = self._until_close(most=1)
        return value

    def _named(self, token: _Token) -> Fraction:
        name = token.text.lower()
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name not in _FUNCTIONS:
            known = ", ".join((*_CONSTANTS, *_FUNCTIONS))
            raise ToolError(f"{token.text!r} at character {token.place} is not known. Known names: {known}.")
        if not self._take("("):
            raise ToolError(f"{name} needs its arguments in parentheses.")
        function, least, most = _FUNCTIONS[name]
        values = self._until_close(most=most)
        if len(values) < least:
            raise ToolError(f"{name} needs at least {least} arguments.")
        return _bounded(function(*values))

    def _until_close(self, *, most: int) -> list[Fraction]:
        self._enter()
        values = [self.sum()]
        while len(values) < most and self._take(","):
            values.append(self.sum())
        if not self._take(")"):
            raise self._unexpected()
        self._nesting -= 1
        return values

    def _enter(self) -> None:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise ToolError(f"The expression is nested deeper than {MAX_NESTING} levels.")

    def _take(self, *symbols: str) -> str | None:
        token = self._tokens[self._at]
        if token.kind != "symbol" or token.text not in symbols:
            return None
        self._at += 1
        return token.text

    def _unexpected(self) -> ToolError:
        token = self._tokens[self._at]
        return ToolError(f"Did not expect {token.text} at character {token.place} of the expression.")


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().replace("_", "").partition("e")
    if len(exponent) > 4 or abs(int(exponent or 0)) > MAX_BITS:
        raise _too_large()
    return Fraction(f"{mantissa}e{exponent or 0}")


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError("The numbers get too large: about 1,200 digits are the limit.")


def _divisor(value: Fraction) -> Fraction:
    if value == 0:
        raise ToolError("The expression divides by zero.")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent == Fraction(1, 2):
            return _square_root(base)
        raise ToolError("An exponent must be a whole number, or 0.5 for the square root.")
    if base in (0, 1, -1):
        size = 0
    else:
        size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
    if size > MAX_BITS:  # before the work is done, since the work is what costs
        raise _too_large()
    return Fraction(_divisor(base) ** exponent.numerator if exponent < 0 else base**exponent.numerator)


def _square_root(value: Fraction) -> Fraction:
    if value < 0:
        raise ToolError("The square root of a negative number is not a real number.")
    context = Context(prec=_SIGNIFICANT_DIGITS)
    precise = Context(prec=MAX_BITS)
    return Fraction(context.sqrt(precise.divide(Decimal(value.numerator), Decimal(value.denominator))))


def _rounded(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if digits.denominator != 1 or abs(digits) > 100:
        raise ToolError("round takes a number of digits from -100 to 100.")
    return Fraction(round(value, digits.numerator))


def _floor_divided(left: Fraction, right: Fraction) -> Fraction:
    return Fraction(left // _divisor(right))


_PRODUCTS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / _divisor(right),
    "//": _floor_divided,
    "%": lambda left, right: left % _divisor(right),
}
_CONSTANTS = {
    "pi": Fraction("3.14159265358979323846264338328"),
    "e": Fraction("2.71828182845904523536028747135"),
}
_FUNCTIONS: dict[str, tuple[Callable[..., Fraction], int, int]] = {
    "sqrt": (_square_root, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_rounded, 1, 2),
    "min": (min, 1, 100),
    "max": (max, 1, 100),
}
