"""Manifests, indexes and configurations as other tools write them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqsh.errors import BadImage
from sqsh.image import find_image
from tests.sqsh.layers import Item, converted, write_image

pytestmark = pytest.mark.sqsh

Json = dict[str, Any]
Change = Callable[[Json, Json, Json], object]


def changed(root: Path, change: Change) -> Path:
    """A layout whose index entry, manifest and configuration `change` has changed, digests right."""
    write_image(root, [[Item(b"a")]])
    blobs = root / "blobs/sha256"
    entry = json.loads((root / "index.json").read_text())["manifests"][0]
    manifest = json.loads((blobs / entry["digest"][7:]).read_text())
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_text())
    entry["platform"] = {"os": "linux", "architecture": "amd64"}

    def store(descriptor: Json, content: Json) -> None:
        raw = json.dumps(content).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (blobs / digest).write_bytes(raw)
        descriptor |= {"digest": f"sha256:{digest}", "size": len(raw)}

    change(entry, manifest, config)
    store(manifest["config"], config)
    store(entry, manifest)
    (root / "index.json").write_text(json.dumps({"manifests": [entry]}))
    return root


@pytest.mark.parametrize(
    "change",
    [
        lambda entry, manifest, config: entry["platform"].update(variant=None),
        lambda entry, manifest, config: entry.update(platform=None),
        lambda entry, manifest, config: entry.update(annotations=None),
        lambda entry, manifest, config: entry.update(annotations={"vendor": None}),
        lambda entry, manifest, config: entry.update(mediaType=None),
        lambda entry, manifest, config: manifest.update(mediaType=None),
        lambda entry, manifest, config: manifest["layers"][0].update(mediaType=None, annotations=None),
        lambda entry, manifest, config: config.update(variant=None),
        lambda entry, manifest, config: config.update(config=None, created=None, history=None),
    ],
)
def test_null_is_as_good_as_left_out(tmp_path: Path, change: Change) -> None:
    image = find_image(str(changed(tmp_path / "oci", change)), "linux/amd64")
    assert image.media_type == "application/vnd.oci.image.manifest.v1+json"
    assert converted(tmp_path / "oci", tmp_path / "out").layers == 1


def test_no_layers_but_not_no_word_of_them(tmp_path: Path) -> None:
    """Go writes null for none. What speaks of no layers at all is no image."""
    empty = changed(tmp_path / "null", lambda entry, manifest, config: manifest.update(layers=None))
    assert find_image(str(empty)).layers == ()
    other = changed(tmp_path / "other", lambda entry, manifest, config: manifest.pop("layers"))
    with pytest.raises(BadImage, match="cannot be read"):
        find_image(str(other))


def test_an_index_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "index.json").mkdir()
    with pytest.raises(BadImage, match=r"index\.json cannot be read \(Is a directory\)"):
        find_image(str(tmp_path))


def test_a_file_system_that_takes_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    write_image(tmp_path / "oci", [[Item(b"a")]])
    monkeypatch.setattr(os, "posix_fadvise", fail)
    converted(tmp_path / "oci", tmp_path / "out")
