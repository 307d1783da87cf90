"""Payloads: what comes back is what went in, byte for byte."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Decision, Payload, SettleKind
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import Probe, kind_name

# Deterministic, incompressible enough, and with every byte value in it.
_LARGE = bytes((index * 167 + index // 256) % 256 for index in range(1024 * 1024))

PAYLOADS = {
    "empty body": Payload("bytes.1", b"", b""),
    "empty form, head and body": Payload("", b"", b""),
    "empty body with a head": Payload("http.1", b"204", b""),
    "NULs": Payload("bytes.1", b"\x00", b"\x00a\x00\x00"),
    "not UTF-8": Payload("bytes.1", b"\xff\xfe", b"\x80\xc3\x28\xed\xa0\x80"),
    "every byte": Payload("bytes.1", bytes(range(256)), bytes(range(255, -1, -1))),
    "1 MiB": Payload("bytes.1", b"", _LARGE),
    "JSON null": Payload("json.1", b"", b"null"),
    "JSON zero": Payload("json.1", b"", b"0"),
    "JSON empty text": Payload("json.1", b"", b'""'),
    "JSON empty object": Payload("json.1", b"", b"{}"),
    "JSON as it was spaced": Payload("json.1", b"", b'{ "b":1.0,\n"a" :1e2 , "a":2}\r\n'),
    "JSON large number": Payload("json.1", b"", b"123456789012345678901234567890.10"),
    "broken JSON": Payload("json.1", b"", b'{"cut'),
    "JSON form, binary body": Payload("json.1", b"", b"\xff\x00"),
    "another release's form": Payload("someday.7", b"head", b"body"),
}

_each_payload = pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())


class PayloadCases(SuiteBase):
    """A store neither reads nor tidies what it keeps."""

    @_each_payload
    @pytest.mark.parametrize("kind", [SettleKind.COMPLETE, SettleKind.FAIL], ids=kind_name)
    def test_an_outcome_replays_byte_for_byte(
        self, probe: Probe, payload: Payload, kind: SettleKind
    ) -> None:
        """Form, head and body of a replay, and of the audit, are the ones that were settled."""
        token = probe.hold()
        assert probe.end(kind, token, payload=payload) is Decision.APPLY
        replayed = probe.claim().payload
        assert replayed == payload
        assert (type(replayed.head), type(replayed.body)) == (bytes, bytes)
        assert [item.payload for item in probe.read().outcomes] == [payload]

    @_each_payload
    def test_a_step_is_kept_byte_for_byte(self, probe: Probe, payload: Payload) -> None:
        """So is the result of a step."""
        token = probe.hold()
        assert probe.record(token, payload=payload) is Decision.APPLY
        (step,) = probe.read().steps
        assert step.payload == payload
        assert (type(step.payload.head), type(step.payload.body)) == (bytes, bytes)
