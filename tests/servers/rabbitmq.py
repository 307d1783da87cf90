"""A real RabbitMQ broker from Debian's package, as an unprivileged user on free ports."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.servers.debian import from_debian
from tests.servers.postgres import START_SECONDS, free_port

# The package's own scripts insist on the system's user; the broker itself does not.
_PLACES = ("/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/local/sbin")


def rabbitmq_binary() -> Path | None:
    """RabbitMQ, installed from Debian's packages when this process may do that."""
    return from_debian("rabbitmq-server", _installed)


def _installed() -> Path | None:
    found = shutil.which("rabbitmq-server", path=os.pathsep.join(_PLACES))
    return None if found is None else Path(found)


class RabbitMQServer:
    """One broker in a temporary folder; `start` may be called again after `stop`."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary
        self.folder = Path(tempfile.mkdtemp(prefix="retrysafe-rabbitmq-"))
        self.port = free_port()
        self.user = "nobody" if os.geteuid() == 0 else None
        self.process: subprocess.Popen[bytes] | None = None
        self.names: subprocess.Popen[bytes] | None = None
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            "log.console = true\n"
            "log.console.level = warning\n"
            "log.file = false\n"
        )
        if self.user is not None:
            entry = pwd.getpwnam(self.user)
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, entry.pw_uid, entry.pw_gid)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def start(self) -> RabbitMQServer:
        names_port = free_port()
        environment = {
            "PATH": f"{self.binary.parent}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            # Erlang keeps its cookie here; nobody else's broker shares it.
            "HOME": str(self.folder),
            "RABBITMQ_NODENAME": f"retrysafe-{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": str(names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            # Two schedulers are plenty for tests, and leave the machine to others.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }
        with (self.folder / "log").open("ab") as log:
            # Erlang's name server. The broker would start one that outlives it.
            self.names = subprocess.Popen(
                ["epmd", "-port", str(names_port), "-address", "127.0.0.1"],
                user=self.user,
                cwd="/",
                stdout=log,
                stderr=log,
            )
            self.process = subprocess.Popen(
                [self.binary],
                user=self.user,
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                # Its own group: the broker starts helpers that must end with it.
                start_new_session=True,
            )
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                text = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"RabbitMQ did not start:\n{text}")
            time.sleep(0.1)
        return self

    def _answers(self) -> bool:
        """Whether the broker speaks: it answers a wrong protocol header with the right one."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.settimeout(2)
                probe.sendall(b"AMQP\x00\x00\x00\x00")
                return probe.recv(8).startswith(b"AMQP")
        except OSError:
            return False

    def stop(self) -> None:
        """Ends the processes of its own group, helpers included."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(60)
            self.process = None
        if self.names is not None:
            self.names.terminate()
            self.names.wait(30)
            self.names = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
