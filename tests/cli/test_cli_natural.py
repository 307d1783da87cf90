"""`retrysafe keys natural`: the key that the application makes, made at a terminal."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from uuid import UUID

import pytest

from retrysafe import FOREVER, Idempotency, natural_key
from retrysafe.cli.problems import ExitCode


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("pay", "invoice_id=42"), natural_key("pay", invoice_id=42)),
        (("pay", "invoice_id=-42"), natural_key("pay", invoice_id=-42)),
        (("pay", "invoice_id=text:42"), natural_key("pay", invoice_id="42")),
        (("pay", "invoice_id=042"), natural_key("pay", invoice_id="042")),
        (("pay", "b=x", "a=1"), natural_key("pay", a=1, b="x")),
        (("ship", "shipment", "7"), natural_key("ship", "shipment", 7)),
        (("ship", "text:a=b"), natural_key("ship", "a=b")),
        (("ship", "a:b"), natural_key("ship", "a:b")),
        (("pay", "n=decimal:9.50"), natural_key("pay", n=Decimal("9.50"))),
        (("pay", "n=int:7"), natural_key("pay", n=7)),
        (("pay", "n=bool:true"), natural_key("pay", n=True)),
        (("pay", "n=none:"), natural_key("pay", n=None)),
        (("pay", "n="), natural_key("pay", n="")),
        (("pay", "n=date:2024-05-01"), natural_key("pay", n=date(2024, 5, 1))),
        (("pay", "n=datetime:2024-05-01T10:00"), natural_key("pay", n=datetime(2024, 5, 1, 10))),  # noqa: DTZ001 — as it is typed.
        (("pay", f"n=uuid:{UUID(int=5)}"), natural_key("pay", n=UUID(int=5))),
        (("pay", "n=" + "9" * 5_000), natural_key("pay", n="9" * 5_000)),
    ],
    ids=lambda item: " ".join(item)[:40] if isinstance(item, tuple) else "",
)
def test_a_natural_key_can_be_made_at_a_terminal(invoke, arguments, key):
    """It is the key that the application makes of the same values, types included."""
    assert invoke("keys", "natural", *arguments).stdout == f"{key}\n"
    assert invoke("keys", "natural", *arguments, "--json").json["key"] == key


def test_a_natural_key_tells_how_its_values_were_read(invoke):
    """Who meant the text 42 sees that a number was taken."""
    outcome = invoke("keys", "natural", "pay", "invoice_id=42", "region=eu", "note=none:")
    assert outcome.stderr == "invoice_id: int 42\nregion: text eu\nnote: none\n"
    shape = invoke("keys", "natural", "pay", "7", "region=eu", "--json").json
    assert shape["parts"] == [{"type": "int", "value": "7"}]
    assert shape["fields"] == {"region": {"type": "text", "value": "eu"}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pay", "n=int:x"), "x is not of the type int"),
        (("pay", "n=bool:maybe"), "maybe is not of the type bool"),
        (("pay", "n=none:x"), "x is not of the type none"),
        (("pay", "n=decimal:x"), "x is not of the type decimal"),
        (("pay", "n=uuid:"), "nothing is not of the type uuid"),
        (("pay", "n=1", "n=2"), "n is given twice"),
        (("pay", "n=\udcff"), "a value is not valid Unicode text"),
        ((), "OPERATION"),
    ],
    ids=lambda item: None if isinstance(item, str) else ascii(" ".join(item)),
)
def test_a_natural_key_of_nonsense_is_refused(invoke, arguments, words):
    outcome = invoke("keys", "natural", *arguments)
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.line


def test_a_natural_key_finds_the_record_of_a_decorated_call(invoke, tmp_path):
    """The way of an operator: from the invoice's number to its record."""
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with Idempotency(url, caller="acme") as idem:
        idem.once(window=FOREVER, key="invoice_id", name="pay")(lambda invoice_id: "paid")(42)
    key = invoke("keys", "natural", "pay", "invoice_id=42").stdout.strip()
    shown = invoke("keys", "show", key, "--caller", "acme", "--store", url, "--json")
    assert shown.json["outcomes"][0]["body"] == "paid"
