"""Images read from a registry: by digest, by tag, and from one that is down, refuses or sends wrong content."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.layout import state_dir
from tests.kit.conftest import Kit, refused
from tests.kit.tiny_image import busybox, write_layout

PROGRAM = shutil.which("docker-registry") or shutil.which("docker-registry", path=state_dir() / "runtime/usr/bin")

pytestmark = [
    pytest.mark.sqsh,
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking with owners needs root"),
]


@dataclass(frozen=True)
class Registry:
    address: str
    data: Path

    def push(self, layout: Path, name: str) -> None:
        target = f"docker://{self.address}/{name}"
        subprocess.run(["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}", target], check=True)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    assert PROGRAM, "docker-registry is missing: run ci/bootstrap.sh"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = tmp_path / "registry.yml"
    storage = f'{{filesystem: {{rootdirectory: "{tmp_path}/registry"}}}}'
    config.write_text(f'version: 0.1\nstorage: {storage}\nhttp: {{addr: "{address}"}}\n')
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", config], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(tuple(address.rsplit(":", 1)), timeout=1).close()  # type: ignore[arg-type]
                break
            except OSError:
                time.sleep(0.05)
        yield Registry(address, tmp_path / "registry")
    finally:
        process.kill()
        process.wait()


def test_same_bytes_from_registry_and_layout(kit: Kit, registry: Registry) -> None:
    digest = kit.release("small", [busybox()])
    registry.push(kit.root / "dist/small/oci", "some/image:latest")
    assert kit("sqsh", "--name", "small").returncode == 0
    squashfs = kit.root / "dist/small/small.sqsh"
    from_layout = squashfs.read_bytes()
    for reference in (f"some/image@{digest}", "some/image:latest", "some/image"):
        squashfs.unlink()
        shutil.rmtree(kit.root / ".state/sqsh-cache")
        finished = kit("sqsh", f"{registry.address}/{reference}", "--name", "small", "--json")
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout)["source_digest"] == digest
        assert squashfs.read_bytes() == from_layout


@pytest.mark.faults
def test_unknown_image(kit: Kit, registry: Registry) -> None:
    refused(
        kit("sqsh", f"{registry.address}/none:latest"),
        1,
        "answers 404",
        "see that the image is there",
    )


@pytest.mark.faults
def test_registry_whose_layer_is_damaged(kit: Kit, registry: Registry, tmp_path: Path) -> None:
    digest = write_layout(tmp_path / "oci", [busybox()])
    registry.push(tmp_path / "oci", "image:latest")
    blobs = [path for path in registry.data.rglob("data") if path.is_file()]
    largest = max(blobs, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")
    refused(kit("sqsh", f"{registry.address}/image@{digest}", "--name", "x"), 1, "sha256:")
    assert not (kit.root / "dist/x/x.sqsh").exists()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("status", "body", "part"),
    [
        (401, "{}", "answers 401"),
        (503, "busy", "503 Service Unavailable"),
        (200, json.dumps({"schemaVersion": 2}), "its content is not what was asked for"),
        (200, "<html>", "its content is not what was asked for"),
    ],
)
def test_registry_that_refuses_or_lies(kit: Kit, status: int, body: str, part: str) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ping = self.path == "/v2/"
            text = b"{}" if ping else body.encode()
            self.send_response(200 if ping else status)
            self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        refused(kit("sqsh", f"127.0.0.1:{server.server_port}/image@sha256:{'0' * 64}"), 1, part)
    finally:
        server.shutdown()
        server.server_close()
