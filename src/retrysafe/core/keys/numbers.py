"""Decimal numbers by their value: `1`, `1.0` and `10e-1` are one number, and no digit is lost."""

from __future__ import annotations

from typing import Final

# More digits than the exponent of any number has that means something. Python takes the square of
# their number in time to read them.
_EXPONENT_LIMIT_CHARACTERS: Final = 40


class Number:
    """A JSON number by its exact decimal value: digits without trailing zeros, and an exponent.

    Raises `ValueError` for an exponent of more than some 40 digits.
    """

    __slots__ = ("text",)

    def __init__(self, lexeme: str) -> None:
        mantissa, _, exponent_text = lexeme.lower().partition("e")
        if len(exponent_text) > _EXPONENT_LIMIT_CHARACTERS:
            raise ValueError("the exponent of a number is too long")
        sign = "-" if mantissa.startswith("-") else ""
        whole, _, fraction = mantissa.lstrip("-").partition(".")
        digits = (whole + fraction).lstrip("0")
        stripped = digits.rstrip("0")
        if not stripped:
            self.text = "0"
            return
        exponent = int(exponent_text or "0") - len(fraction) + len(digits) - len(stripped)
        self.text = f"{sign}{stripped}e{exponent}"
