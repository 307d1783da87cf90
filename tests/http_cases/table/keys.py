"""The key: its syntax to the letter of the draft, what lenient routes take as well, its sources."""

from __future__ import annotations

from tests.http_cases.cases import (
    FORM,
    RAW_APPLICATION,
    Ran,
    Refused,
    Replay,
    Untouched,
    case,
    get,
    post,
    send,
)

INVALID = Refused(problem="key-invalid")
MISSING = Refused(problem="key-missing")
REUSED = Refused(problem="key-reused")


def typed(order: bytes, hexadecimal: bytes) -> bytes:
    """A body with an order, and a UUID that has this digit in it."""
    return b'{"order":%b,"by":"0189f7ea-aba0-7c33-ab1f-7fc6ca9b5e2%b"}' % (order, hexadecimal)


def _refused(name: str, promise: str, key: str | bytes | tuple[str, ...], says: str, **more):
    """A malformed key, refused on strict and on lenient routes alike; nothing is remembered."""
    refusal = Refused(problem="key-invalid", says=says)
    return case(
        f"key-{name}",
        promise,
        *(post(key=key), refusal, post("/strict", key=key), refusal),
        *(post(key='"k"'), Ran()),
        **more,
    )


def _strict_only(name: str, promise: str, key: str):
    """A key that strict routes refuse and lenient ones take, as the same key as its string."""
    return case(
        f"key-{name}",
        promise,
        *(post("/strict", key=key), INVALID),
        *(post(key=key), Ran(), post(key=f'"{key}"'), Replay()),
    )


def _same(name: str, promise: str, first: str, second: str):
    """Two spellings of one key, on a strict route."""
    return case(
        f"key-{name}",
        promise,
        *(post("/strict", key=first), Ran(), post("/strict", key=second), Replay()),
    )


def _different(name: str, promise: str, first: str, second: str):
    return case(
        f"key-{name}",
        promise,
        *(post(key=first), Ran(), post(key=second), Ran()),
        *(post(key=first), Replay(run=1), post(key=second), Replay(run=2)),
    )


CASES = (
    case(
        "key-missing",
        "A request without a key is refused where one is required",
        post(key=None),
        MISSING,
    ),
    case(
        "key-missing-then-sent",
        "A refusal for a missing key is not remembered",
        *(post(key=None), MISSING, post(), Ran(), post(), Replay()),
    ),
    case(
        "key-missing-every-method",
        "All state-changing methods require a key",
        *(send("PUT", key=None), MISSING, send("PATCH", key=None), MISSING),
        *(send("DELETE", key=None), MISSING),
    ),
    case(
        "key-quoted",
        "A quoted string is the key, as the draft says",
        *(post("/strict", key='"8e03978e-40d5-43e8-bc93-6894a57f9324"'), Ran()),
        *(post("/strict", key='"8e03978e-40d5-43e8-bc93-6894a57f9324"'), Replay()),
    ),
    case(
        "key-problem-names-it",
        "A problem tells the key that was sent",
        *(post(), Ran(), post(body=b"{}"), Refused(problem="key-reused", key="k")),
    ),
    _strict_only("bare-token", "A bare token is taken, unless the route is strict", "order-42"),
    _strict_only(
        "bare-uuid",
        "A bare UUID that begins with a digit is taken, unless the route is strict",
        "8e03978e-40d5-43e8-bc93-6894a57f9324",
    ),
    _strict_only(
        "bare-number", "A bare number is taken as text, unless the route is strict", "12345"
    ),
    _strict_only("bare-base64", "Bare base64 is taken, unless the route is strict", "c2FmZQ+/=="),
    _strict_only("bare-odd", "Bare punctuation is taken, unless the route is strict", "a:b/c@d(e)"),
    case(
        "key-bare-backslash",
        "A backslash in a bare key is a backslash; in a string it must be escaped",
        *(post(key="a\\b"), Ran(), post(key='"a\\\\b"'), Replay()),
    ),
    _same("parameters-ignored", "Parameters after the string do not count", '"k"', '"k";a=1;b="x"'),
    _same("parameter-flag", "A parameter without a value is true", '"k"', '"k";flag'),
    _same(
        "parameter-types", "Parameters may be of every type", '"k"', '"k";a=1.5;b=tok;c=?1;d=:YQ==:'
    ),
    _same("parameter-spaces", "Spaces may stand before a parameter's name", '"k"', '"k";   a=1'),
    _same("escaped-quote", "An escaped quote is part of the key", '"a\\"b"', '"a\\"b"'),
    _same("escaped-backslash", "An escaped backslash is part of the key", '"a\\\\b"', '"a\\\\b"'),
    case(
        "key-escapes-are-decoded",
        "The key that a problem tells has its escapes decoded",
        *(post(key='"a\\"b\\\\c"'), Ran()),
        *(post(key='"a\\"b\\\\c"', body=b"{}"), Refused(problem="key-reused", key='a"b\\c')),
    ),
    _same("spaces-inside", "Spaces inside the quotes are part of the key", '" a  b "', '" a  b "'),
    _different("spaces-count", "Keys that differ by a space are two keys", '"a b"', '"a  b"'),
    _different("case-counts", "Keys that differ by case are two keys", '"order"', '"Order"'),
    _different("percent-is-plain", "Nothing in a key is decoded as in a URL", '"a%20b"', '"a b"'),
    _different(
        "semicolon-inside", "A semicolon inside the quotes is part of the key", '"a;b=1"', '"a"'
    ),
    _different("comma-inside", "A comma inside the quotes is part of the key", '"a,b"', '"a"'),
    case(
        "key-one-character",
        "A key may have one character",
        post(key='"x"'),
        Ran(),
        post(key='"x"'),
        Replay(),
    ),
    case(
        "key-255-characters",
        "A key may have 255 characters",
        *(post(key='"' + "x" * 255 + '"'), Ran(), post(key='"' + "x" * 255 + '"'), Replay()),
        *(post(key="x" * 255), Replay()),
    ),
    _refused("256-characters", "A key of 256 characters is refused", '"' + "x" * 256 + '"', "255"),
    case(
        "key-256-bare-characters",
        "A bare key of 256 characters is refused",
        *(post(key="x" * 256), Refused(problem="key-invalid", says="255")),
    ),
    case(
        "key-255-after-escapes",
        "Characters are counted after escapes are decoded",
        *(post(key='"' + '\\"' * 255 + '"'), Ran()),
        *(post(key='"' + '\\"' * 256 + '"'), Refused(problem="key-invalid", says="255")),
    ),
    _refused("empty-header", "An empty header is no key", "", "empty"),
    _refused("empty-string", "An empty string is no key", '""', "1 to 255"),
    _refused("one-dot", "A dot is no key: it has no place in a URL", '"."', "URL"),
    _refused("two-dots", "Nor are two", '".."', "URL"),
    _refused("unclosed", "A string without its closing quote is refused", '"abc', "closing quote"),
    _refused("quote-inside", "A bare value with a quote inside is refused", 'ab"c', ""),
    _refused("bad-escape", "A backslash before anything else is refused", '"a\\bc"', "backslash"),
    _refused("text-after", "Text after the string is refused", '"a" b', "parameters"),
    _refused("text-joined", "Text joined to the string is refused", '"a"b', "parameters"),
    _refused("list", "A list of keys is refused", '"a", "b"', "list"),
    _refused("list-of-one-key", "A list is refused even of one key twice", '"a", "a"', "list"),
    _refused(
        "bad-parameter-name", "A parameter's name begins with a letter", '"a";1=2', "parameters"
    ),
    _refused(
        "upper-case-parameter", "A parameter's name is in lower case", '"a";A=1', "parameters"
    ),
    _refused("parameter-without-name", "A semicolon needs a parameter", '"a";', "parameters"),
    _refused("parameter-bad-value", "A parameter's value is an item", '"a";b=%', "parameters"),
    _refused("utf-8", "UTF-8 inside the quotes is refused", '"caf\u00e9"'.encode(), "ASCII"),
    _refused(
        "latin-1", "Latin-1 inside the quotes is refused", '"caf\u00e9"'.encode("latin-1"), "ASCII"
    ),
    _refused(
        "bare-utf-8", "A bare key in UTF-8 is refused", "\u0448\u043b\u044e\u0437".encode(), "ASCII"
    ),
    _refused("two-lines", "Two header lines are refused", ('"a"', '"b"'), ""),
    _refused("two-equal-lines", "Two header lines with one key are refused", ('"a"', '"a"'), ""),
    _refused("two-bare-lines", "Two bare header lines are refused", ("a", "a"), ""),
    _refused("bare-space", "A bare key with a space is refused", "order 42", ""),
    _refused("bare-comma", "A bare key with a comma is refused", "a,b", ""),
    _refused("bare-semicolon", "A bare key with a semicolon is refused", "a;b", ""),
    case(
        "key-header-name-any-case",
        "The header's name may be written in any case",
        *(post(key=None, headers=(("IDEMPOTENCY-KEY", '"k"'),)), Ran()),
        *(post(key=None, headers=(("idempotency-key", '"k"'),)), Replay()),
    ),
    case(
        "key-other-header",
        "A key in another header is no key",
        post(key=None, headers=(("X-Idempotency-Key", '"k"'),)),
        MISSING,
    ),
    case(
        "key-optional-without",
        "Without a key, an optional route runs unprotected every time",
        *(post("/optional", key=None), Untouched(), post("/optional", key=None), Untouched()),
    ),
    case(
        "key-optional-with",
        "With a key, an optional route is protected",
        *(post("/optional"), Ran(), post("/optional"), Replay()),
    ),
    case(
        "key-optional-malformed",
        "A malformed key is refused where keys are optional, too",
        *(post("/optional", key='"a'), INVALID),
    ),
    case(
        "key-off",
        "A route that is switched off ignores keys",
        *(post("/v1/open"), Untouched(), post("/v1/open"), Untouched()),
        *(post("/v1/open", key='"a'), Untouched(), post("/v1/open", caller=None), Untouched()),
    ),
    case(
        "key-wildcard-route",
        "A rule for everything below a path protects it all",
        *(post("/v1/a/b", key=None), MISSING, post("/v1/a/b"), Ran(), post("/v1/a/b"), Replay()),
    ),
    case(
        "key-unlisted-path",
        "A path without a rule is untouched",
        *(post("/elsewhere"), Untouched(), post("/elsewhere"), Untouched()),
    ),
    case(
        "key-unlisted-method",
        "A method that the rule does not name is untouched",
        *(post("/posts-only"), Ran(), post("/posts-only"), Replay()),
        *(send("PUT", "/posts-only"), Untouched(), send("PUT", "/posts-only"), Untouched()),
    ),
    case(
        "key-natural",
        "A natural key is made from fields of the request; a retry needs no header",
        *(post("/natural", key=None, body=b'{"customer":"c1","order":7}'), Ran()),
        *(post("/natural", key=None, body=b'{"order":7,"customer":"c1"}'), Replay()),
        *(post("/natural", key=None, body=b'{"customer":"c1","order":8}'), Ran()),
    ),
    case(
        "key-natural-framed",
        "The fields of a natural key never run together",
        *(post("/natural", key=None, body=b'{"customer":"a","order":"bc"}'), Ran()),
        *(post("/natural", key=None, body=b'{"customer":"ab","order":"c"}'), Ran()),
        *(post("/natural", key=None, body=b'{"customer":"1","order":"7"}'), Ran()),
        *(post("/natural", key=None, body=b'{"customer":"17","order":""}'), INVALID),
    ),
    case(
        "key-natural-number-as-text",
        "A number is the same number where it is sent as text, and has one spelling there",
        *(post("/natural", key=None, body=b'{"customer":"c1","order":7}'), Ran()),
        *(post("/natural", key=None, body=b'{"customer":"c1","order":7.0}'), Replay()),
        *(post("/natural", key=None, body=b'{"customer":"c1","order":"7"}'), REUSED),
        post("/natural", key=None, body=b"customer=c1&order=7", content_type=FORM),
        REUSED,
        *(
            step
            for text in (b"07", b"+7", b" 7", b"7.0", b"7e0", b"1_0")
            for step in (
                post("/natural", key=None, body=b'{"customer":"c1","order":"%b"}' % text),
                Refused(problem="key-invalid", says="/order"),
            )
        ),
    ),
    case(
        "key-natural-spellings",
        "A parameter of the path that can be written in several ways is taken in the plainest",
        *(post("/natural/7", key=None), Ran()),
        *(
            step
            for text in ("07", "7%20", "%207", "7.0", "7e0", "%EF%BC%97", "%D9%A7")
            for step in (post(f"/natural/{text}", key=None), INVALID)
        ),
        *(post("/natural/0189F7EA-ABA0-7C33-AB1F-7FC6CA9B5E2A", key=None), INVALID),
        *(post("/natural/e%CC%81", key=None), INVALID),
        *(post("/natural/%C3%A9", key=None), Ran()),
    ),
    case(
        "key-natural-converted",
        "A parameter that the framework converts is one value in all its spellings",
        *(post("/numbered/7", key=None), Ran(), post("/numbered/7", key=None), Replay()),
        *(post("/numbered/07", key=None), REUSED, post("/numbered/007", key=None), REUSED),
        *(post("/numbered/08", key=None), Ran(), post("/numbered/8", key=None), REUSED),
        without={
            RAW_APPLICATION: "it converts nothing",
            "django-rules": "the middleware comes before Django's converters",
        },
    ),
    case(
        "key-natural-typed",
        "A declared type gives one value to all spellings that it takes, and refuses the others",
        *(post("/typed/7", key=None, body=typed(b"8", b"b")), Ran()),
        *(post("/typed/7", key=None, body=typed(b"8", b"b")), Replay()),
        *(post("/typed/07", key=None, body=typed(b"8", b"b")), REUSED),
        *(post("/typed/7", key=None, body=typed(b'"8"', b"b")), REUSED),
        *(post("/typed/7", key=None, body=typed(b"8.0", b"B")), REUSED),
        *(post("/typed/x", key=None, body=typed(b"8", b"b")), INVALID),
        *(post("/typed/7", key=None, body=typed(b"8.5", b"b")), INVALID),
        *(post("/typed/7", key=None, body=typed(b"8", b"g")), INVALID),
        *(post("/typed/7", key=None, body=typed(b"9", b"b")), Ran()),
    ),
    case(
        "key-natural-mismatch",
        "Another request under a natural key is refused",
        *(post("/natural", key=None, body=b'{"customer":"c1","order":7,"amount":1}'), Ran()),
        post("/natural", key=None, body=b'{"customer":"c1","order":7,"amount":2}'),
        Refused(problem="key-reused"),
    ),
    case(
        "key-natural-and-a-header",
        "Where keys are made from fields, a client's own key does not make a second request",
        *(post("/natural", key='"a"', body=b'{"customer":"c1","order":7}'), Ran()),
        *(post("/natural", key='"b"', body=b'{"customer":"c1","order":7}'), Replay()),
    ),
    case(
        "key-natural-missing-field",
        "A request without a field of its natural key is refused, with the field's name",
        post("/natural", key=None, body=b'{"customer":"c1"}'),
        Refused(problem="key-invalid", says="/order"),
        post("/natural", key=None, body=b'{"customer":"c1","order":null}'),
        Refused(problem="key-invalid", says="/order"),
        post("/natural", key=None, body=b'{"customer":{},"order":7}'),
        Refused(problem="key-invalid", says="/customer"),
        *(post("/natural", key=None, body=b"not json"), INVALID),
    ),
    case(
        "key-natural-form",
        "A natural key can come from a form",
        post("/natural", key=None, body=b"customer=c1&order=7", content_type=FORM),
        Ran(),
        post("/natural", key=None, body=b"order=7&customer=c%31", content_type=FORM),
        Replay(),
        post("/natural", key=None, body=b"customer=c1&order=7&order=8", content_type=FORM),
        Refused(problem="key-invalid", says="/order"),
    ),
    case(
        "key-natural-path",
        "A natural key can come from the path",
        *(
            send("PUT", "/natural/7", key=None),
            Ran(),
            send("PUT", "/natural/7", key=None),
            Replay(),
        ),
        *(send("PUT", "/natural/8", key=None), Ran()),
    ),
    case(
        "key-body",
        "A key made from the whole request dedups clients that send none",
        *(post("/hashed", key=None), Ran(), post("/hashed", key=None), Replay()),
        *(post("/hashed", key=None, body=b'{"amount":2}'), Ran()),
        *(post("/hashed?a=1", key=None), Ran()),
        *(post("/hashed", key=None, caller="bob"), Ran()),
    ),
    case(
        "key-body-and-a-header",
        "A client's own key is refused where requests are recognised by all that they ask for",
        *(post("/hashed", key='"a"'), Refused(problem="key-unexpected")),
        *(post("/hashed", key=None), Ran()),
    ),
    case(
        "key-header-else-body",
        "Clients with a key and clients without share a route",
        *(post("/shared", key='"a"'), Ran(), post("/shared", key='"a"'), Replay()),
        *(post("/shared", key='"b"'), Ran(), post("/shared", key='"b"', body=b"{}"), REUSED),
        *(post("/shared", key=None), Ran(), post("/shared", key=None), Replay(run=3)),
        *(post("/shared", key=None, body=b'{"amount":2}'), Ran()),
        *(post("/shared", key='"open'), INVALID),
    ),
    case(
        "key-body-intent-header",
        "A header tells two equal requests without a key apart",
        *(post("/shared", key=None), Ran()),
        *(post("/shared", key=None, headers=(("X-Intent", "1"),)), Ran()),
        *(post("/shared", key=None, headers=(("x-intent", "1"),)), Replay(run=2)),
        *(post("/shared", key=None, headers=(("X-Intent", "2"),)), Ran()),
        *(post("/shared", key=None), Replay(run=1)),
        *(post("/shared", key='"a"', headers=(("X-Intent", "1"),)), Ran()),
        *(post("/shared", key='"a"', headers=(("X-Intent", "2"),)), Replay(run=4)),
    ),
    case(
        "key-body-intent-field",
        "A field tells two equal requests apart, also one that is left out of the comparison",
        *(post("/intents", key=None, body=b'{"amount":1}'), Ran()),
        *(post("/intents", key=None, body=b'{"amount":1,"at":2}'), Replay()),
        *(post("/intents", key=None, body=b'{"amount":1,"intent":"a"}'), Ran()),
        *(post("/intents", key=None, body=b'{"amount":1,"intent":"a","at":2}'), Replay(run=2)),
        *(post("/intents", key=None, body=b'{"amount":1,"intent":"b"}'), Ran()),
        *(post("/intents", key=None, body=b'{"amount":1,"intent":["b"]}'), INVALID),
    ),
    case(
        "key-body-excluded",
        "Fields that are left out of the comparison are left out of a body key",
        *(post("/hashed-fields", key=None, body=b'{"a":1,"sent_at":1}'), Ran()),
        *(post("/hashed-fields", key=None, body=b'{"sent_at":2,"a":1}'), Replay()),
        *(post("/hashed-fields", key=None, body=b'{"a":2,"sent_at":1}'), Ran()),
    ),
    case(
        "key-on-get",
        "A key on a GET is ignored: safe methods are never protected",
        *(get("/charges", key='"k"'), Untouched(), get("/charges", key='"k"'), Untouched()),
        *(get("/charges", key='"a'), Untouched()),
    ),
)
