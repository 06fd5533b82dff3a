"""Damaged layers of any kind: converted or refused in one line, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqsh.convert import Options
from sqsh.errors import BadImage
from sqsh.stream import Limits
from tests.sqsh.layers import Item, folder, hardlink, made, packed, symlink, tar

pytestmark = pytest.mark.sqsh

LIMITS = Limits(bytes=64 << 20, entries=10_000)
SEEDS = [
    tar(
        [
            folder(b"d"),
            Item(b"d/file", b"content" * 300, xattrs={"user.a": b"1"}),
            hardlink(b"d/link", b"d/file"),
            symlink(b"s", b"d"),
            Item(b"n" * 150, b"x"),
            Item(b"pipe", type=tarfile.FIFOTYPE),
            Item(b"d/.wh.x"),
        ],
        form,
    )
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
]
CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["set", "cut", "insert", "copy"]), st.binary(max_size=24)),
    max_size=8,
)


def changed(data: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    for place, how, text in changes:
        at = place % (len(data) + 1)
        if how == "set":
            data = data[:at] + text + data[at + len(text) :]
        elif how == "cut":
            data = data[:at] + data[at + len(text) * 40 :]
        elif how == "insert":
            data = data[:at] + text + data[at:]
        else:
            at -= at % 512
            data = data[:at] + data[at : at + 1024] + data[at:]
    return data


def summed(data: bytes) -> bytes:
    """The same with right check sums, so that damage gets further than those."""
    blocks = []
    for at in range(0, len(data), 512):
        block = data[at : at + 512]
        if block[257:262] == b"ustar" and len(block) == 512:
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            block = block[:148] + b"%06o\0 " % total + block[156:]
        blocks.append(block)
    return b"".join(blocks)


def convert_or_refuse(layers: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        with contextlib.suppress(BadImage):
            made(root, list(layers), Options(limits=LIMITS, processors=1), "tar")
        assert {path.name for path in root.iterdir()} <= {"oci", "image.sqsh"}


def fuzz(
    seed: int, changes: list[tuple[int, str, bytes]], sums: bool, how: str, packed_changes: list[tuple[int, str, bytes]]
) -> None:
    data = changed(SEEDS[seed], changes)
    data = summed(data) if sums else data
    convert_or_refuse([SEEDS[seed], changed(packed(data, how), packed_changes)])


WORDS: tuple[st.SearchStrategy[Any], ...] = (
    st.integers(0, 1),
    CHANGES,
    st.booleans(),
    st.sampled_from(["tar", "gzip", "zstd"]),
    st.one_of(st.just([]), CHANGES),
)


@settings(max_examples=250, deadline=5000, suppress_health_check=list(HealthCheck))
@given(*WORDS)
def test_damaged_layers(seed: int, changes: list, sums: bool, how: str, packed_changes: list) -> None:  # type: ignore[type-arg]
    fuzz(seed, changes, sums, how, packed_changes)


@pytest.mark.full
@settings(max_examples=8000, deadline=5000, suppress_health_check=list(HealthCheck))
@given(*WORDS)
def test_damaged_layers_for_long(seed: int, changes: list, sums: bool, how: str, packed_changes: list) -> None:  # type: ignore[type-arg]
    fuzz(seed, changes, sums, how, packed_changes)
