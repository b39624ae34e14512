r"""Serve S3 on one host: OpenStack Swift with its S3 interface, one copy of all objects in one folder.

    AWS_ACCESS_KEY_ID=TEAM:PERSON AWS_SECRET_ACCESS_KEY=... \
        python infra/swift/serve.py FOLDER --port 9000 --bucket NAME

The configuration is written at each start; objects stay in FOLDER/devices, on a file system with extended
attributes. Four servers (proxy, account, container, object) and the updater, which completes listings that
missed a write, run until one of them ends or this process gets a signal. Swift checks signatures, checksums
and `If-None-Match`. One copy on one disk is no backup.

Source: Swift's deployment guide and the reference of its s3api middleware.
"""

import argparse
import base64
import ctypes
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Module of each server of Swift.
SERVERS = {
    "account": "swift.account.server",
    "container": "swift.container.server",
    "object": "swift.obj.server",
    "proxy": "swift.proxy.server",
}
STORAGE = tuple(SERVERS)[:3]
UPDATING = "swift.obj.updater"
PROGRAM = """
import sys
from swift.common.utils import set_swift_dir
set_swift_dir(sys.argv.pop(1))  # servers read it from their configuration, the updater only looks into /etc
from {module} import main
sys.exit(main())
"""
# Longest wait for the endpoint to accept connections, in seconds.
LONGEST_START = 60.0
PR_SET_PDEATHSIG = 1

COMMON = """[DEFAULT]
bind_ip = {host}
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
log_level = WARNING
conn_timeout = 5
node_timeout = 60
recon_cache_path = {folder}/cache
"""

SERVER = """
[pipeline:main]
pipeline = {kind}-server

[app:{kind}-server]
use = egg:swift#{kind}
"""

UPDATER = """
[object-updater]
interval = 5
"""

PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats bulk s3api tempauth copy dlo slo symlink versioned_writes
    proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true

[filter:s3api]
use = egg:swift#s3api
location = {region}
max_upload_part_num = 10000

[filter:tempauth]
use = egg:swift#tempauth
user64_{team}_{person} = {secret} .admin

[filter:slo]
use = egg:swift#slo
max_manifest_segments = 10000

[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
""" + "".join(
    f"\n[filter:{name}]\nuse = egg:swift#{name}\n"
    for name in ("catch_errors", "gatekeeper", "listing_formats", "bulk", "copy", "dlo", "symlink")
)

IDENTITY = """[swift-hash]
swift_hash_path_suffix = cuda-agent

[storage-policy:0]
name = one
default = yes
"""


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [listener.getsockname()[1] for listener in held]
    for listener in held:
        listener.close()
    return ports


def configure(folder: Path, host: str, port: int, key: str, secret: str, region: str) -> None:
    """Write Swift's configuration files, and its rings (tables of storage devices), into `folder`.

    `host`, `port` and `region` are those of the S3 endpoint, and `key` (TEAM:PERSON) and `secret` are its
    credentials. The storage servers listen on any free ports of this host.
    """
    from swift.common.ring import RingBuilder

    def word(text: str) -> str:
        return base64.b64encode(text.encode()).decode().rstrip("=")

    team, _, person = key.partition(":")
    user = getpass.getuser()
    (folder / "devices" / "one").mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir(exist_ok=True)
    (folder / "swift.conf").write_text(IDENTITY)
    for kind, inner in zip(STORAGE, free_ports(len(STORAGE)), strict=True):
        ring = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
        ring.add_dev(
            {
                "region": 1,
                "zone": 1,
                "ip": "127.0.0.1",
                "port": inner,
                "device": "one",
                "weight": 1.0,
                "meta": "",
            }
        )
        ring.rebalance(seed=1)
        ring.get_ring().save(str(folder / f"{kind}.ring.gz"))
        common = COMMON.format(host="127.0.0.1", port=inner, user=user, folder=folder)
        (folder / f"{kind}.conf").write_text(
            common + SERVER.format(kind=kind) + (UPDATER if kind == "object" else "")
        )
    proxy = folder / "proxy.conf"
    proxy.touch(mode=0o600)
    common = COMMON.format(host=host, port=port, user=user, folder=folder)
    proxy.write_text(
        common + PROXY.format(region=region, team=word(team), person=word(person), secret=secret)
    )


def launch(module: str, configuration: Path) -> subprocess.Popen[bytes]:
    def tie() -> None:
        """Make the kernel send SIGTERM to the new server when the process that started it ends."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    command = [sys.executable, "-c", PROGRAM.format(module=module), configuration.parent, configuration, "-v"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie)


def make_bucket(endpoint: str, bucket: str) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=endpoint, config=Config(retries={"mode": "standard", "max_attempts": 10})
    )
    if bucket not in [item["Name"] for item in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--bucket", help="made unless it is there")
    given = parser.parse_args()
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if (
        not all(key.partition(":"))
        or not secret
        or any(letter.isspace() or letter == "%" for letter in secret)
    ):
        parser.error(
            "AWS_ACCESS_KEY_ID must have the form TEAM:PERSON, and AWS_SECRET_ACCESS_KEY must be set, "
            "without spaces and per cent signs."
        )
    folder = given.folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.setxattr(folder, "user.swift.metadata", b"")
    except OSError as error:
        parser.error(
            f"{folder}: cannot store objects ({error.strerror}); give a folder on a file system with "
            "extended attributes."
        )
    configure(folder, given.host, given.port, key, secret, os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))

    running = [launch(module, folder / f"{kind}.conf") for kind, module in SERVERS.items()] + [
        launch(UPDATING, folder / "object.conf")
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        deadline = time.monotonic() + LONGEST_START
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", given.port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        if given.bucket:
            make_bucket(f"http://127.0.0.1:{given.port}", given.bucket)
        print(f"S3 on http://{given.host}:{given.port}, kept in {folder}", flush=True)
        while all(process.poll() is None for process in running):
            time.sleep(0.5)
        sys.exit(1)
    except KeyboardInterrupt:
        pass
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


if __name__ == "__main__":
    main()
