"""`retrysafe demo` as a command: how it starts, how it ends, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.demo.server import CHARGE, PATIENCE_SECONDS, command, headers_of, new_text


def run(*arguments, **options):
    """A start that is expected to fail."""
    return subprocess.run(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        **options,
    )


def test_it_serves_on_a_file_in_var_and_says_what_to_paste(tmp_path):
    """Without options but a port: the file is made, and the lines that are shown work."""
    with subprocess.Popen(
        command("--port", "0"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            shown = [process.stdout.readline() for _ in range(7)]
            assert shown[0].startswith("retrysafe demo: http://127.0.0.1:")
            assert "sqlite:///var/demo.db" in shown[0]
            lines = [line.strip() for line in shown if line.strip().startswith("curl")]
            statuses = [
                subprocess.run(
                    ["bash", "-c", f"{line} -s"],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_SECONDS,
                    check=True,
                ).stdout.split()[1]
                for line in lines
            ]
            assert statuses == ["201", "201", "422"]
            assert (tmp_path / "var" / "demo.db").exists()
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(PATIENCE_SECONDS)
            process.kill()
    assert code == 0


def test_a_terminal_shows_where_to_look_and_one_line_for_every_request(tmp_path):
    """Whoever watches sees replays and refusals; control characters of clients are spelled out."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command("--port", "0"), cwd=tmp_path, stdout=theirs)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb", buffering=0) as screen:

            def shown_until(mark):
                text = b""
                while mark not in text:
                    text += screen.read(1024)
                return text.decode()

            shown = shown_until(b"All calls: ")
            url = shown.split()[2]
            for place in ("/effects", "/idempotency-policy"):
                assert f"{url}{place}" in shown
            with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
                for _ in range(2):
                    client.post("/charges", headers=headers_of("k"), json=CHARGE)
                client.get("/no%1B[2Jwhere")
            told = shown_until(b"404 Not Found")
            lines = [line for line in told.split("\r\n") if line]
            assert lines[-3:] == [
                "POST /charges: 201 Created",
                "POST /charges: 201 Created, replayed",
                "GET /no%1B%5B2Jwhere: 404 Not Found",
            ]
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_when_it_is_told_to(start_demo, store_url, number):
    """Exit code 0, and not a word on stderr; the next one starts on the same port at once."""
    first = start_demo(store_url)
    assert first.client.get("/effects").json() == []
    assert first.stop(number) == (0, "")
    start_demo(store_url, port=int(first.url.rpartition(":")[2]))


def test_a_request_under_way_is_finished_first(start_demo, store_url):
    """Ctrl-C lets it end, and the client gets its answer."""
    demo = start_demo(store_url)
    key = new_text("key")

    async def scenario():
        body = CHARGE | {"delay_ms": 1000}
        async with httpx.AsyncClient(base_url=demo.url, timeout=PATIENCE_SECONDS) as client:
            tasks = [
                asyncio.create_task(client.post("/charges", headers=headers_of(key), json=body))
                for _ in range(2)
            ]
            _, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            demo.process.send_signal(signal.SIGINT)
            (task,) = running
            return await task

    assert asyncio.run(scenario()).status_code == 201
    assert demo.process.wait(PATIENCE_SECONDS) == 0


def test_a_port_in_use_is_told_in_one_line(tmp_path):
    """It says what to do, and leaves no file behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("--port", str(port), cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"retrysafe: port {port} is in use: choose another with --port (make run PORT=8001), or "
        "stop what listens there\n"
    )
    assert not (tmp_path / "var" / "demo.db").exists()


def unreachable():
    """A port where nobody listens, as far as anybody can know."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"postgresql://nobody@127.0.0.1:{probe.getsockname()[1]}/none"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--store", "nonsense"), 2, "names no store"),
        (("--store", "memory://"), 2, "survives it"),
        (("--store", "sqlite:////nowhere/at/all.db"), 3, "there is no folder"),
        (("--store", "postgresql://db/app?pool=none"), 2, "pool is a number"),
        (("--store", unreachable()), 3, "does not answer"),
        (("--port", "99999"), 2, "--port takes"),
        (("--port", "http"), 2, "--port takes"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(arguments, code, words):
    """No traceback, whatever is wrong with the store or the port."""
    ended = run("--port", "0", *arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith("retrysafe: ")
    assert ended.stderr.count("\n") == 1
    assert words in ended.stderr


def test_the_password_of_the_store_is_not_shown(tmp_path):
    """Neither in messages nor where the demo says what it runs on."""
    url = unreachable().replace("nobody@", "nobody:geheim@")
    ended = run("--port", "0", "--store", url)
    assert "geheim" not in ended.stdout + ended.stderr
    assert "nobody:***@" in ended.stderr


@pytest.mark.parametrize("module", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_named(module):
    """Who installed retrysafe without it hears how to get it."""
    code = (
        "import sys\n"
        f"sys.modules[{module!r}] = None\n"
        "from retrysafe.cli import main\n"
        "sys.argv = ['retrysafe', 'demo', '--json']\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    told = json.loads(ended.stderr)
    assert told["error"] == "UsageError"
    assert "extra demo" in told["message"]


def test_the_environment_does_not_choose_the_store(tmp_path, monkeypatch):
    """A store that is set for operators must not get the keys of a demo."""
    monkeypatch.setenv("RETRYSAFE_STORE", "nonsense")
    with subprocess.Popen(
        command("--port", "0", "--json"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            told = "".join(process.stdout.readline() for _ in range(4))
            # At once: a signal that comes before the server runs is not lost.
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()
    assert json.loads(told)["store"] == "sqlite:///var/demo.db"
