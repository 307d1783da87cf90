"""Secrets that are replaced: what began under one list of them goes on under the next."""

from __future__ import annotations

import pytest

from retrysafe import Idempotency, InvalidInput, Key, KeyReused, Policy, child_key, current_attempt
from retrysafe.core.keys.secret import Secret
from retrysafe.core.outbox.staging import entry_key
from retrysafe.core.settings import secrets_of
from retrysafe.errors import SecretMissing
from retrysafe.runtime.calls import calls_of

OLD, NEW = "the old secret of 16 or more", "the new secret of 16 or more"
KEY = Key("k-1", caller="acme")
# As a fleet goes through a rotation, and through its first secret.
STAGES = [None, [OLD], [OLD, NEW], [NEW, OLD], [NEW]]


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch):
    monkeypatch.delenv("RETRYSAFE_SECRET", raising=False)


@pytest.mark.parametrize("position", range(len(STAGES) - 1))
def test_an_honest_retry_is_replayed_from_stage_to_stage(shared, subject, position):
    """Both ways, as in a deploy: and another request is refused where the secret is known."""
    for number, (first, second) in enumerate([(position, position + 1), (position + 1, position)]):
        key = Key(f"k-{number}", caller="acme")
        made, read = (subject(shared, secret=STAGES[item]) for item in (first, second))
        runs = []
        assert made.run(key, runs.append, 7) is None
        assert read.run(key, runs.append, 7) is None
        assert runs == [7]
        is_known = not STAGES[first] or STAGES[first][0] in (STAGES[second] or ())
        if is_known:
            with pytest.raises(KeyReused):
                read.run(key, runs.append, 8)
        assert runs == [7]


def test_a_fingerprint_in_the_store_is_keyed(shared, subject):
    """Whoever reads the store cannot try requests: a plain one is in it only without a secret."""
    plain, keyed, other = (subject(shared, secret=secret) for secret in (None, OLD, [NEW, OLD]))
    stored = []
    for number, face in enumerate((plain, keyed, other)):
        key = Key(f"k-{number}", caller="acme")
        face.run(key, str, 7)
        record = face.call("read", key).record
        stored.append((record.rule, record.fingerprint))
    assert [rule for rule, _ in stored] == [1, -1, -1]
    assert len({digest for _, digest in stored}) == 3
    tags = [digest[:3] for _, digest in stored[1:]]
    assert tags == [Secret(OLD.encode()).tag, Secret(NEW.encode()).tag]


def made_by(shared, subject, secret, key=KEY):
    """What an attempt of a process with this secret makes: a child key, and an entry's."""
    seen = []

    def operation() -> None:
        attempt = current_attempt()
        seen.append(attempt.child_key("charge"))
        seen.append(attempt.outbox.stage("mail", "hello"))
        raise ConnectionError("again")

    with pytest.raises((ConnectionError, SecretMissing)) as caught:
        subject(shared, secret=secret, policy=Policy()).run(key, operation, name="pay")
    if caught.type is SecretMissing:
        assert seen == []
        return None
    return tuple(seen)


def expected(secret, key=KEY):
    value = secret.encode()
    return child_key(value, key, "charge"), entry_key(value, key, "mail", 1)


def test_child_keys_outlive_a_rotation(shared, subject):
    """Every attempt sends the keys of the first one, whichever secret is the first by then."""
    assert made_by(shared, subject, [OLD]) == expected(OLD)
    for secret in ([OLD, NEW], [NEW, OLD], [OLD]):
        assert made_by(shared, subject, secret) == expected(OLD)
    other = Key("k-2", caller="acme")
    assert made_by(shared, subject, [NEW, OLD], other) == expected(NEW, other)
    for secret in ([NEW], [OLD, NEW], [NEW, OLD]):
        assert made_by(shared, subject, secret, other) == expected(NEW, other)


def test_child_keys_that_would_differ_are_refused(shared, subject):
    """A process that does not know the first attempt's secret would send a second charge."""
    assert made_by(shared, subject, [NEW, OLD]) == expected(NEW)
    assert made_by(shared, subject, [OLD]) is None
    assert made_by(shared, subject, [NEW]) == expected(NEW)


def test_what_began_before_fingerprints_were_keyed_goes_on_with_one_secret(shared, subject):
    """Child keys were made with the secret of that time, and no list says which one that is."""
    with pytest.raises(ConnectionError):
        subject(shared).run(KEY, _fails, name="pay")
    assert made_by(shared, subject, [OLD, NEW]) is None
    assert made_by(shared, subject, [NEW, OLD]) is None
    assert made_by(shared, subject, [OLD]) == expected(OLD)


def _fails() -> None:
    raise ConnectionError("again")


@pytest.mark.parametrize(
    ("text", "rules"), [(f"{NEW}\n{OLD}\n", [-1, -1, 1]), (f"{NEW}\nnone", [-1, 1]), ("\n", [1])]
)
def test_the_environment_lists_a_secret_a_line(monkeypatch, text, rules):
    """The word none stands for what was made without one; empty lines for nothing."""
    monkeypatch.setenv("RETRYSAFE_SECRET", text)
    with Idempotency("memory://", caller="acme") as idem:
        secrets = calls_of(idem).settings.secrets
        made = calls_of(idem).settings.fingerprints(None, "charge", {})
    assert [item.rule for item in made] == rules
    assert secrets.has_plain is ("none" in text or not text.strip())
    assert secrets.value == (NEW.encode() if rules[0] < 0 else None)


PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("text", [PEM, f"{NEW}\n{OLD}", f"{NEW}\r\nnone"])
@pytest.mark.parametrize("form", [str, str.encode])
def test_a_secret_of_several_lines_is_not_taken_apart(text, form):
    """The first line of a PEM file is known to everybody; a list says what is meant."""
    with pytest.raises(InvalidInput, match="pass a list") as caught:
        secrets_of(form(text))
    assert not any(line in str(caught.value) for line in text.splitlines())
    assert [item.value for item in secrets_of([text]).listed] == [text.encode()]


@pytest.mark.parametrize("secret", [f"{NEW}\n", b"\x80\nrandom bytes..", b"\0\nrandom bytes..."])
def test_a_line_break_at_the_end_or_in_random_bytes_is_none(secret):
    assert secrets_of(secret).value == (NEW.encode() if isinstance(secret, str) else secret)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PEM, "PEM"),
        (f"{NEW},{OLD}", "each on a line of its own"),
        (f"{NEW}, none", "each on a line of its own"),
        (f"{NEW}\\n{OLD}", "with real line breaks"),
        (f"{NEW}\n{OLD},short", r"pass secret=\["),
    ],
)
def test_what_may_mean_several_secrets_in_the_environment_is_refused(monkeypatch, text, told):
    """As one secret it would be another one than all that are meant."""
    monkeypatch.setenv("RETRYSAFE_SECRET", text)
    with pytest.raises(InvalidInput, match=told) as caught:
        Idempotency("memory://", caller="acme")
    assert NEW not in str(caught.value)
    # A secret with a comma in it is one where a list says so.
    with Idempotency("memory://", caller="acme", secret=[f"{NEW},{OLD}"]) as idem:
        assert len(calls_of(idem).settings.secrets.listed) == 1
