"""A body is sent again only if it is the same body: bytes, files that rewind, or what was kept."""

from __future__ import annotations

import io

import pytest

from retrysafe.client import RetryPolicy, Stopped
from tests.client.clients import CONNECTION_ERRORS
from tests.client.server import Answer, Drop

CHUNKS = (b"first,", b"second,", b"third")


class Unseekable(io.RawIOBase):
    """A file such as a pipe: it can be read once."""

    def __init__(self, data: bytes) -> None:
        self._rest = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        return self._rest.readinto(buffer)


def test_a_body_that_can_be_read_once_is_sent_once(server, client):
    """An answer is given back as it is, and says why it was not retried."""
    server.script(Answer(503))
    answer = client.send("POST", "/charges", client.one_shot(*CHUNKS))
    assert (answer.status, answer.tries.count) == (503, 1)
    assert answer.tries.stopped is Stopped.BODY
    assert [seen.body for seen in server.seen] == [b"".join(CHUNKS)]
    # It went out with a key, so that its caller can still send it again safely.
    assert server.keys[0] == answer.tries.key


def test_an_error_says_that_the_body_could_not_be_sent_again(server, client):
    """The note holds the key to go on with."""
    server.script(Drop(after_effect=True))
    with pytest.raises(CONNECTION_ERRORS) as caught:
        client.send("POST", "/charges", client.one_shot(*CHUNKS))
    (note,) = caught.value.__notes__
    assert server.keys[0] in note
    assert note.endswith("the body can be read only once")


def test_a_body_is_kept_for_retries_when_the_policy_has_room(server, make_client):
    """Both tries carry the same bytes and the same key."""
    client = make_client(policy=RetryPolicy(request_buffer_bytes=len(b"".join(CHUNKS))))
    server.script(Drop(after_effect=True))
    assert client.send("POST", "/charges", client.one_shot(*CHUNKS)).replayed
    assert [seen.body for seen in server.seen] == [b"".join(CHUNKS)] * 2
    assert len(set(server.keys)) == 1


def test_a_body_over_the_limit_is_sent_whole_and_once(server, make_client):
    """What was read to find out is not lost."""
    client = make_client(policy=RetryPolicy(request_buffer_bytes=len(b"".join(CHUNKS)) - 1))
    server.script(Answer(503))
    answer = client.send("POST", "/charges", client.one_shot(*CHUNKS))
    assert (answer.status, answer.tries.stopped) == (503, Stopped.BODY)
    assert [seen.body for seen in server.seen] == [b"".join(CHUNKS)]


def test_a_form_with_files_is_sent_again_byte_for_byte(server, client):
    """Also its boundary stays, so that a strict server sees the same request."""
    server.script(Drop(after_effect=True))
    answer = client.send_files("/uploads", {"scan": ("scan.txt", io.BytesIO(b"page one"))})
    assert answer.replayed
    first, second = server.seen
    assert b"page one" in first.body
    assert (first.body, first.headers["content-type"]) == (
        second.body,
        second.headers["content-type"],
    )


@pytest.mark.parametrize("make_client", ["httpx", "httpx-async"], indirect=True)
def test_a_form_with_a_file_that_does_not_rewind_is_sent_once(server, client):
    """The second try would carry an empty file, and nobody would notice."""
    server.script(Answer(503))
    file = io.BufferedReader(Unseekable(b"page one"))
    answer = client.send_files("/uploads", {"scan": ("scan.txt", file)})
    assert (answer.status, answer.tries.stopped) == (503, Stopped.BODY)
    assert b"page one" in server.seen[0].body


@pytest.mark.parametrize("make_client", ["requests"], indirect=True)
def test_requests_rewinds_a_file_to_where_it_began(server, client):
    file = io.BytesIO(b"skipped,rest")
    file.read(8)
    server.script(Drop(after_effect=True))
    assert client.send("POST", "/charges", file).replayed
    assert [seen.body for seen in server.seen] == [b"rest"] * 2


@pytest.mark.parametrize("make_client", ["requests"], indirect=True)
def test_requests_sends_a_pipe_once_unless_it_may_be_kept(server, make_client):
    """A file object that cannot rewind is like any other one-time body."""
    server.script(Answer(503))
    plain = make_client()
    answer = plain.send("POST", "/charges", io.BufferedReader(Unseekable(b"data")))
    assert (answer.status, answer.tries.stopped) == (503, Stopped.BODY)
    keeping = make_client(policy=RetryPolicy(request_buffer_bytes=100))
    server.script(Answer(503))
    answer = keeping.send("POST", "/charges", io.BufferedReader(Unseekable(b"data")))
    assert answer.status == 201
    assert [seen.body for seen in server.seen] == [b"data"] * 3


@pytest.mark.parametrize("make_client", ["httpx"], indirect=True)
def test_httpx_file_content_counts_as_read_once(server, client):
    """httpx does not rewind it: the second try would send an empty body."""
    server.script(Answer(503))
    answer = client.send("POST", "/charges", io.BytesIO(b"data"))
    assert (answer.status, answer.tries.stopped) == (503, Stopped.BODY)
    assert [seen.body for seen in server.seen] == [b"data"]
