"""A real RabbitMQ broker from Debian's package, as an unprivileged user on free ports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.servers.debian import from_debian
from tests.servers.process import ServerProcess, free_port, unprivileged

# The package's own scripts insist on the system's user; the broker itself does not.
_FOLDERS = ("/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/local/sbin")


def rabbitmq_binary() -> Path | None:
    """RabbitMQ, installed from Debian's packages when this process may do that."""
    return from_debian("rabbitmq-server", _installed)


def _installed() -> Path | None:
    found = shutil.which("rabbitmq-server", path=os.pathsep.join(_FOLDERS))
    return None if found is None else Path(found)


class RabbitMQServer(ServerProcess):
    """One broker in a temporary folder; `start` may be called again after `stop`."""

    name = "RabbitMQ"
    look_seconds = 0.1

    def __init__(self, binary: Path) -> None:
        super().__init__()
        self.binary = binary
        self.user = unprivileged()
        self.names: subprocess.Popen[bytes] | None = None
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            "log.console = true\n"
            "log.console.level = warning\n"
            "log.file = false\n"
        )
        self.give_to(self.user)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def launch(self, log):
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
        # Erlang's name server. The broker would start one that outlives it.
        names = ("epmd", "-port", names_port, "-address", "127.0.0.1")
        self.names = self.begin(log, names, user=self.user, cwd="/")
        return self.begin(
            log,
            [self.binary],
            user=self.user,
            cwd=self.folder,
            env=environment,
            # Its own group: the broker starts helpers that must end with it.
            start_new_session=True,
        )

    def answers(self) -> bool:
        """Whether the broker speaks: it answers a wrong protocol header with the right one."""
        return self.replies(b"AMQP\x00\x00\x00\x00", b"AMQP")

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
