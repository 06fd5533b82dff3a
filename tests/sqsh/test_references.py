"""Which image a text names, who we are to its registry, and what enroot is told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sqsh.cli import main
from sqsh.errors import BadImage, UsageError
from sqsh.image import find_image
from sqsh.reference import Reference, parse_reference
from tests.sqsh.layers import OCI, Item, write_image
from tests.sqsh.registry import Request, served

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ubuntu", Reference("registry-1.docker.io", "library/ubuntu", "latest")),
        ("docker://ubuntu:24.04", Reference("registry-1.docker.io", "library/ubuntu", "24.04")),
        ("team/image", Reference("registry-1.docker.io", "team/image", "latest")),
        ("nvcr.io#nvidia/cuda:13", Reference("nvcr.io", "nvidia/cuda", "13")),
        ("localhost:5000/a/b@" + DIGEST, Reference("localhost:5000", "a/b", DIGEST)),
        ("127.0.0.1:5000/a:tag@" + DIGEST, Reference("127.0.0.1:5000", "a", DIGEST)),
        ("index.docker.io/ubuntu", Reference("registry-1.docker.io", "library/ubuntu", "latest")),
        ("[::1]:5000/a", Reference("[::1]:5000", "a", "latest")),
        ("registry#team/image", Reference("registry", "team/image", "latest")),
        ("docker://$oauthtoken@nvcr.io#nvidia/cuda:13", Reference("nvcr.io", "nvidia/cuda", "13", "$oauthtoken")),
        ("docker://ann@corp.com@a.io#b:1@" + DIGEST, Reference("a.io", "b", DIGEST, "ann@corp.com")),
        ("ann@a.io/b", Reference("a.io", "b", "latest", "ann")),
        ("docker://ann@ubuntu", Reference("registry-1.docker.io", "library/ubuntu", "latest", "ann")),
    ],
)
def test_references(text: str, wanted: Reference) -> None:
    assert parse_reference(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "a b",
        "host.io/",
        "a@sha256:12",
        "a:b:c",
        "x.io/a/../b",
        "#a",
        "@a.io/b",
        "a/b@c.io/d",
        "evil.io?x.io/a",
        "a.io:x/b",
        "a b.io/c",
        f"a.io/b@{DIGEST}@{DIGEST}",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError, match="no image reference"):
        parse_reference(text)


def index_of(root: Path, *platforms: str) -> None:
    """A layout whose index.json names one index of images, one a platform."""
    entries: list[dict[str, Any]] = []
    for name in platforms:
        system, architecture, *variant = name.split("/")
        layout = root / name.replace("/", "-")
        write_image(layout, [[Item(name.encode().replace(b"/", b"-"))]], platform=name)
        entry = json.loads((layout / "index.json").read_text())["manifests"][0]
        entry["platform"] = {"os": system, "architecture": architecture, **({"variant": variant[0]} if variant else {})}
        entries.append(entry)
        (root / "oci/blobs/sha256").mkdir(parents=True, exist_ok=True)
        for blob in (layout / "blobs/sha256").iterdir():
            (root / "oci/blobs/sha256" / blob.name).write_bytes(blob.read_bytes())
    raw = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (root / "oci/blobs/sha256" / digest).write_bytes(raw)
    top = {"mediaType": f"{OCI}.index.v1+json", "digest": f"sha256:{digest}", "size": len(raw)}
    (root / "oci/index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))


def test_the_image_of_a_platform(tmp_path: Path) -> None:
    index_of(tmp_path, "linux/amd64", "linux/arm64/v8", "linux/arm/v7", "unknown/unknown")
    found = {
        name: find_image(str(tmp_path / "oci"), name).digest for name in ("linux/amd64", "linux/arm64", "linux/arm/v7")
    }
    assert len(set(found.values())) == 3
    with pytest.raises(UsageError, match=r"has no image for linux/riscv64.*linux/amd64, linux/arm"):
        find_image(str(tmp_path / "oci"), "linux/riscv64")
    with pytest.raises(UsageError, match="is no platform"):
        find_image(str(tmp_path / "oci"), "amd64")
    for name, other in (("linux/amd64", "linux/arm64"), ("linux/arm/v7", "linux/arm/v6")):
        with pytest.raises(UsageError, match=f"is an image for {name}, not for {other}"):
            find_image(str(tmp_path / name.replace("/", "-")), other)


@pytest.mark.parametrize(
    ("there", "wanted", "answer"),
    [
        (["linux/arm64/v8"], "linux/arm64", "linux/arm64/v8"),
        (["linux/arm64"], "linux/arm64/v8", "linux/arm64"),
        (["linux/arm64"], "linux/aarch64", "linux/arm64"),
        (["linux/arm64/8"], "linux/arm64/v8", "linux/arm64/8"),
        (["linux/arm64/v9", "linux/arm64/v8"], "linux/arm64", "linux/arm64/v8"),
        (["linux/arm64/v9", "linux/arm64"], "linux/arm64", "linux/arm64"),
        (["linux/arm64", "linux/arm64/v9"], "linux/arm64/v9", "linux/arm64/v9"),
        (["linux/amd64/v3", "linux/amd64/v2", "linux/amd64"], "linux/amd64", "linux/amd64"),
        (["linux/amd64/v3", "linux/amd64/v1"], "linux/x86_64", "linux/amd64/v1"),
        (["linux/amd64/v3", "linux/amd64/v2"], "linux/amd64/v2", "linux/amd64/v2"),
        (["linux/amd64/v3", "linux/amd64/v2"], "linux/amd64", "linux/amd64/v3"),
        (["linux/arm/v6", "linux/arm/v7"], "linux/arm/v7", "linux/arm/v7"),
        (["linux/arm/v6", "linux/arm/v7"], "linux/arm/7", "linux/arm/v7"),
        (["linux/arm/v6", "linux/arm/v7"], "linux/armhf", "linux/arm/v7"),
        (["linux/arm/v6"], "linux/arm/v7", "linux/arm/v6"),
        (["linux/arm/v5", "linux/arm/v6", "linux/arm/v8"], "linux/arm/v7", "linux/arm/v6"),
        (["linux/arm/v6", "linux/arm"], "linux/arm/v7", "linux/arm"),
        (["linux/amd64/v2", "linux/amd64/v4"], "linux/amd64/v3", "linux/amd64/v2"),
        (["linux/arm64/v8.1", "linux/arm64/v8.5"], "linux/arm64/v9", "linux/arm64/v8.5"),
        (["windows/amd64", "linux/amd64"], "Linux/AMD64", "linux/amd64"),
    ],
)
def test_variants_of_a_platform(tmp_path: Path, there: list[str], wanted: str, answer: str) -> None:
    index_of(tmp_path, *there, "unknown/unknown")
    layout = tmp_path / answer.replace("/", "-")
    assert find_image(str(tmp_path / "oci"), wanted).digest == find_image(str(layout), wanted).digest


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ("linux/arm/v7", "linux/arm/v6"),
        ("linux/arm64/v9", "linux/arm64/v8.2"),
        ("linux/arm64", "linux/arm/v8"),
        ("linux/arm/hf", "linux/arm/v7"),
    ],
)
def test_another_platform(tmp_path: Path, there: str, wanted: str) -> None:
    index_of(tmp_path, there, "unknown/unknown")
    with pytest.raises(UsageError, match=f"has no image for {wanted}.*{there}"):
        find_image(str(tmp_path / "oci"), wanted)


def test_indexes_in_indexes(tmp_path: Path) -> None:
    index_of(tmp_path, "linux/amd64")
    for depth in range(3, 12):
        raw = (tmp_path / "oci/index.json").read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        (tmp_path / "oci/blobs/sha256" / digest).write_bytes(raw)
        top = {"mediaType": f"{OCI}.index.v1+json", "digest": f"sha256:{digest}", "size": len(raw)}
        (tmp_path / "oci/index.json").write_text(json.dumps({"manifests": [top]}))
        if depth < 8:
            assert find_image(str(tmp_path / "oci"), "linux/amd64").layers
    with pytest.raises(BadImage, match="cannot be read"):
        find_image(str(tmp_path / "oci"), "linux/amd64")


@pytest.mark.parametrize(
    "media_type", ["application/vnd.docker.distribution.manifest.v1+prettyjws", "application/json"]
)
def test_schema_1_by_its_name(tmp_path: Path, media_type: str) -> None:
    """Its digest is not that of its bytes, which is no news to anybody."""
    raw = json.dumps({"schemaVersion": 1, "name": "r", "fsLayers": [], "history": [], "signatures": [{}]}).encode()

    def hook(request: Request) -> bool:
        return request.send(200, raw, {"Content-Type": media_type})

    with served(tmp_path, hook) as registry:
        for name in (registry.image, f"{registry.host}/r@{DIGEST}"):
            with pytest.raises(BadImage, match=r"has a manifest of schema 1.*push it again"):
                find_image(name)
    digest = hashlib.sha256(raw).hexdigest()
    write_image(tmp_path / "oci", [])
    (tmp_path / "oci/blobs/sha256" / digest).write_bytes(raw)
    top = {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(raw)}
    (tmp_path / "oci/index.json").write_text(json.dumps({"manifests": [top]}))
    with pytest.raises(BadImage, match="has a manifest of schema 1"):
        find_image(str(tmp_path / "oci"))


def test_enroot_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "enroot", f"a.io/team/image@{DIGEST}", str(tmp_path / "out")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    (tmp_path / "enroot").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "enroot").chmod(0o755)
    assert main(words) == 0
    assert capfd.readouterr().out == f"import --output {tmp_path / 'out'} docker://a.io#team/image@{DIGEST}\n"
    assert main(["--engine", "enroot", "docker://ann@a.io#image:1", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().out == f"import --output {tmp_path / 'out'} docker://ann@a.io#image:1\n"
