"""A host that vanishes inside a transaction: a server and its client, each in a network of its own.

Run in a new network namespace (`unshare --net`) with the server's version and settings as
arguments. The client has a namespace of its own, with a cable between the two. It opens a
transaction over TCP and locks a row; then the cable is pulled, so that neither a FIN nor an answer
to a probe ever comes. Prints how long the row stayed locked, as it is seen through the server's
Unix socket.
"""

from __future__ import annotations

import subprocess
import sys
import time

import psycopg

from tests.servers.postgres import PostgresServer, debian_binaries

# What a server as it comes would exceed by hours.
LIMIT_SECONDS = 20.0
# Nobody else sees these: each namespace is empty but for its end of the cable.
SERVER, HOST = "10.9.0.1", "10.9.0.2"

CLIENT = """
import sys, time, psycopg
sys.stdin.readline()
connection = psycopg.connect(sys.argv[1])
connection.execute("UPDATE orders SET state = 'booked'")
print("locked", flush=True)
time.sleep(600)
"""


def ip(*args: str, beside: int | None = None) -> None:
    entered = [] if beside is None else ["nsenter", "--net", "--target", str(beside)]
    subprocess.run([*entered, "ip", *args], check=True)


def plug(pid: int) -> None:
    """Connects the namespace of that process with this one."""
    ip("link", "add", "ours", "type", "veth", "peer", "name", "theirs")
    ip("link", "set", "theirs", "netns", str(pid))
    for address, device, beside in ((SERVER, "ours", None), (HOST, "theirs", pid)):
        ip("address", "add", f"{address}/24", "dev", device, beside=beside)
        ip("link", "set", device, "up", beside=beside)


def main(version: str, *settings: str) -> None:
    ip("link", "set", "lo", "up")
    server = PostgresServer(
        debian_binaries() if version == "15" else None,
        settings={
            "fsync": "off",
            "listen_addresses": "*",
            **dict(item.split("=") for item in settings),
        },
    )
    with (server.data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {HOST}/32 trust\n")
    url = server.url().replace("127.0.0.1", SERVER)
    client = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", CLIENT, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        server.start()
        local = f"host={server.folder} port={server.port} user=retrysafe dbname=postgres"
        with psycopg.connect(local, autocommit=True) as rival:
            rival.execute("CREATE TABLE orders AS SELECT 'new'::text AS state")
            plug(client.pid)
            client.stdin.write(b"\n")
            client.stdin.flush()
            assert client.stdout.readline() == b"locked\n"
            # Its system acknowledges the server's last answer within 40 ms. Before that the server
            # sends the answer again and again, and no probes.
            time.sleep(0.5)
            ip("link", "set", "theirs", "down", beside=client.pid)
            began = time.monotonic()
            while time.monotonic() - began < LIMIT_SECONDS:
                free = rival.execute("SELECT 1 FROM orders FOR UPDATE SKIP LOCKED").fetchall()
                if free:
                    print(f"free after {time.monotonic() - began:.1f} s")
                    return
                time.sleep(0.05)
            print("still locked")
    finally:
        client.kill()
        client.communicate()
        server.remove()


if __name__ == "__main__":
    main(*sys.argv[1:])
