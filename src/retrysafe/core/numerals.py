"""Decimal numbers by their value: `1`, `1.0` and `10e-1` are one number, and no digit is lost."""

from __future__ import annotations


class Number:
    """A JSON number by its exact decimal value: digits without trailing zeros, and an exponent."""

    __slots__ = ("text",)

    def __init__(self, lexeme: str) -> None:
        mantissa, _, exponent_text = lexeme.lower().partition("e")
        sign = "-" if mantissa.startswith("-") else ""
        whole, _, fraction = mantissa.lstrip("-").partition(".")
        digits = (whole + fraction).lstrip("0")
        stripped = digits.rstrip("0")
        if not stripped:
            self.text = "0"
            return
        exponent = int(exponent_text or "0") - len(fraction) + len(digits) - len(stripped)
        self.text = f"{sign}{stripped}e{exponent}"
