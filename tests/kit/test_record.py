"""The release record: whole or not there, growing only, and as its schema says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.errors import KitError
from kit.record import SCHEMA_FILE, ImageSection, PushSection, add_section, json_schema, read_record, start_record

pytestmark = pytest.mark.unit


def image(digit: str = "a") -> ImageSection:
    return ImageSection(
        name="cpu",
        profile="cpu",
        digest=f"sha256:{digit * 64}",
        media_type="application/vnd.docker.distribution.manifest.v2+json",
        size=1,
        layers=[],
        key="0" * 64,
        inputs={},
        source_date_epoch=0,
    )


def push(reference: str) -> PushSection:
    return PushSection(reference=reference, digest=f"sha256:{'a' * 64}")


def test_the_published_schema_is_that_of_the_models() -> None:
    assert SCHEMA_FILE.read_text() == json_schema(), (
        f"{SCHEMA_FILE.name} is not what the models say: write json_schema() to it"
    )


def test_sections_are_added_and_never_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    start_record(path, image())
    add_section(path, push("here:1/a:b"))
    add_section(path, push("here:1/a:b"))
    with pytest.raises(KitError, match="already has another 'push' section"):
        add_section(path, push("there:1/a:b"))
    assert add_section(path, push("there:1/a:b"), replace=True) == read_record(path)
    assert "sqsh" not in json.loads(path.read_text())


def test_the_same_digest_keeps_the_record_and_another_keeps_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    start_record(path, image())
    add_section(path, push("here:1/a:b"))
    assert start_record(path, image()).push is not None
    assert start_record(path, image("b")).push is None
    assert read_record(tmp_path / "earlier/aaaaaaaaaaaa.json").push is not None


def test_a_build_that_gives_the_same_digest_by_other_sources_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    start_record(path, image())
    add_section(path, push("here:1/a:b"))
    again = start_record(path, image().model_copy(update={"key": "1" * 64}))
    assert again.push is not None
    assert again.image.key == "1" * 64


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 2, "image": {}}', "\x00"])
def test_garbage_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(KitError, match="is not a release record") as caught:
        read_record(path)
    assert "\n" not in str(caught.value)


def test_no_record_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="make the image first"):
        read_record(tmp_path / "record.json")
