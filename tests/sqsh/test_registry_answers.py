"""What a registry may answer: manifests by other names, parts that begin elsewhere, places that are none."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from sqsh import transport
from sqsh.errors import SqshError
from sqsh.image import find_image
from tests.sqsh.layers import OCI, Item, converted, write_image
from tests.sqsh.registry import Request, served

pytestmark = pytest.mark.sqsh


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(transport, "wait", lambda stopped, seconds: stopped.is_set())
    write_image(tmp_path / "oci", [[Item(b"file", os.urandom(300_000))]], how="tar")
    return tmp_path / "oci"


def manifest_of(layout: Path) -> bytes:
    digest = str(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 500])
def test_an_indexs_manifests_are_asked_for_as_manifests(layout: Path, tmp_path: Path, status: int) -> None:
    """Some registries do not say 404 where a manifest's digest is asked for as a blob."""
    top = json.loads((layout / "index.json").read_text())
    child = top["manifests"][0] | {"platform": {"os": "linux", "architecture": "amd64"}}
    raw = json.dumps({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [child]}).encode()
    index = hashlib.sha256(raw).hexdigest()
    (layout / "blobs/sha256" / index).write_bytes(raw)
    (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{index}", "size": len(raw)}]}))

    def hook(request: Request) -> bool:
        return request.path.endswith(f"/blobs/{child['digest']}") and request.send(status)

    with served(layout, hook) as registry:
        assert find_image(registry.image, "linux/amd64").digest == child["digest"]


@pytest.mark.parametrize(
    "media_type", ["application/json", "text/plain; charset=utf-8", f"{OCI}.manifest.v1+json ; x=y", "", "None"]
)
@pytest.mark.parametrize("stated", [True, False])
def test_a_manifests_type_is_its_own(layout: Path, media_type: str, stated: bool) -> None:
    """Whatever a registry calls it: image.json holds the type, and bytes must not depend on where they come from."""
    raw = manifest_of(layout)
    if not stated:
        raw = json.dumps({key: value for key, value in json.loads(raw).items() if key != "mediaType"}).encode()
    headers = {"Content-Type": media_type} if media_type != "None" else {}

    def hook(request: Request) -> bool:
        return "/manifests/" in request.path and request.send(200, raw, headers)

    with served(layout, hook) as registry:
        assert find_image(registry.image).media_type == f"{OCI}.manifest.v1+json"


@pytest.mark.parametrize(
    ("begins", "stated"),
    [(0, "bytes {}-9/10"), (-1000, "bytes {}-9/10"), (0, "200"), (None, ""), (None, "bytes */10"), (None, "nonsense")],
)
def test_where_the_rest_of_a_blob_begins(layout: Path, tmp_path: Path, begins: int | None, stated: str) -> None:
    """At byte `begins`, counted from what was asked for if below 0 (None: there), as Content-Range says, if at all."""
    blob = find_image(str(layout)).layers[0].digest
    data = (layout / "blobs" / blob.replace(":", "/")).read_bytes()

    def hook(request: Request) -> bool:
        if blob not in request.path:
            return False
        if not (asked := request.headers.get("Range")):
            return request.send(200, data, cut=100_000)
        wanted = int(asked.removeprefix("bytes=").removesuffix("-"))
        start = wanted if begins is None else wanted + begins if begins < 0 else begins
        if stated == "200":
            return request.send(200, data)
        return request.send(206, data[start:], {"Content-Range": stated.format(start)})

    with served(layout, hook) as registry:
        converted(registry.image, tmp_path / "out")


def test_a_part_that_begins_too_late(layout: Path, tmp_path: Path) -> None:
    blob = find_image(str(layout)).layers[0].digest
    data = (layout / "blobs" / blob.replace(":", "/")).read_bytes()

    def hook(request: Request) -> bool:
        if blob not in request.path:
            return False
        if "Range" not in request.headers:
            return request.send(200, data, cut=1000)
        return request.send(206, data[5000:], {"Content-Range": f"bytes 5000-{len(data) - 1}/{len(data)}"})

    with served(layout, hook) as registry, pytest.raises(SqshError, match="breaks off after 1000 of"):
        converted(registry.image, tmp_path / "out")


def test_a_whole_blob_whose_answer_lacks_its_end(layout: Path, tmp_path: Path) -> None:
    """Chunks without the last, empty one. Nothing is asked for again: there are no bytes left."""
    blob = find_image(str(layout)).layers[0].digest
    data = (layout / "blobs" / blob.replace(":", "/")).read_bytes()

    def hook(request: Request) -> bool:
        if blob not in request.path:
            return False
        if "Range" in request.headers:
            return request.send(416)
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        return request.reset()

    with served(layout, hook) as registry:
        converted(registry.image, tmp_path / "out")


@pytest.mark.parametrize("place", ["http://[::1/x", "http://127.0.0.1:none/x", "http://"])
def test_redirects_to_what_is_no_place(layout: Path, place: str) -> None:
    def hook(request: Request) -> bool:
        return request.send(307, headers={"Location": place})

    with served(layout, hook) as registry, pytest.raises(SqshError, match=r"127\.0\.0\.1"):
        find_image(registry.image)
