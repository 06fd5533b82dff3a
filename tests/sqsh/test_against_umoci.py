"""Random stacks of layers: what we make of them is, entry by entry, what umoci unpacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.sqsh.layers import Item, folder, hardlink, made, symlink, tar, tree, unsquashed

pytestmark = [pytest.mark.sqsh, pytest.mark.skipif(os.geteuid() != 0, reason="unpacking with owners needs root")]

Path_ = tuple[bytes, ...]

NAMES = st.sampled_from([b"a", b"b", b"c", b"\xff\xfe", "ü".encode(), b"n" * 120])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
CONTENTS = st.sampled_from(
    [b"", b"x", b"one file", bytes(5000), b"many " * 3000, os.urandom(1) * 140_000, bytes(300_000)]
)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o4755, 0o2711, 0o1777, 0o700])
OWNERS = st.sampled_from([0, 1, 1000, 3_000_000])
XATTRS = st.sampled_from([{}, {}, {"user.note": b"text"}, {"user.b": b"\0\xff", "trusted.t": b"1"},
    {"security.capability": b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0"}])  # fmt: skip
STEPS = st.tuples(
    st.sampled_from(["file", "file", "folder", "symlink", "hardlink", "fifo", "device", "whiteout", "opaque"]),
    PATHS,
    PATHS,
    CONTENTS,
    MODES,
    OWNERS,
    XATTRS,
    st.integers(0, 2**32 - 1),
)
STACKS = st.lists(st.lists(STEPS, max_size=12), min_size=1, max_size=4)


class Stack:
    """Turns steps into layers that a well-meaning builder could have written, dropping steps that make no sense.

    Left out on purpose, as tools differ there: a whiteout in a layer that has entries at or below that path already;
    setgid folders, whose mark the kernel hands on to folders that no layer states. And as no builder writes it: one
    thing by two names, one of them through a link, in the same layer.
    """

    def __init__(self) -> None:
        self.state: dict[Path_, str] = {}
        self.targets: dict[Path_, Path_] = {}
        self.aliases: set[Path_] = set()  # hard links to links, through which no builder writes
        self.layers: list[list[Item]] = []
        self._touched: set[Path_] = set()
        self._spelling: dict[Path_, Path_] = {}

    def begin(self) -> None:
        self.layers.append([])
        self._touched = set()
        self._spelling = {}

    def step(
        self,
        what: str,
        path: Path_,
        other: Path_,
        content: bytes,
        mode: int,
        owner: int,
        xattrs: dict[str, bytes],
        mtime: int,
    ) -> None:
        name, raw = b"/".join(path), path
        parent, target = self._real(path[:-1]), self._real(other[:-1])
        if parent is None:
            return
        path = (*parent, path[-1])
        if self._spelling.setdefault(path, raw) != raw:
            return
        through = {raw[:depth] for depth in range(1, len(raw)) if self.state.get(raw[:depth]) == "symlink"}
        if what in ("whiteout", "opaque"):
            self._hide(what, path, name)
            self._touched |= through
            return
        self._touched |= through
        words: dict[str, Any] = {"owner": owner, "mtime": mtime}
        if what == "hardlink":
            linked, other = other, (*(target or ()), other[-1])
            if (
                target is None
                or linked[: len(raw)] == raw
                or self.state.get(other) in (None, "folder")
                or path[: len(other)] == other
                or other[: len(path)] == path
            ):
                return
            item = hardlink(name, b"/".join(linked))
            kind = self.state[other]
        elif what == "folder":
            item, kind = folder(name, mode & ~0o2000, xattrs=xattrs, **words), "folder"
        elif what == "symlink":
            item, kind = symlink(name, b"/".join(other)), "symlink"
        elif what == "file":
            item, kind = Item(name, content, mode=mode, xattrs=xattrs, **words), "file"
        else:
            type = tarfile.FIFOTYPE if what == "fifo" else tarfile.CHRTYPE
            item, kind = Item(name, type=type, mode=mode, device=(1, mtime % 256), **words), what
        if not (self.state.get(path) == kind == "folder"):
            self._remove(path)
        self.targets[path] = other
        (self.aliases.add if what == "hardlink" else self.aliases.discard)(path)
        for depth in range(1, len(path)):
            self.state[path[:depth]] = "folder"
            self._touched.add(path[:depth])
        self.state[path] = kind
        self._touched.add(path)
        self.layers[-1].append(item)

    def _real(self, path: Path_) -> Path_ | None:
        """Where a folder is that some of `path` are links to; None where it is none, or a link to it leads nowhere."""
        found: Path_ = ()
        rest = list(path)
        links = 0
        while rest:
            found = (*found, rest.pop(0))
            kind = self.state.get(found, "folder")
            if kind == "symlink" and links < 10 and found not in self.aliases:
                rest = [*self.targets[found], *rest]
                found = found[:-1]
                links += 1
            elif kind != "folder" or (links and found not in self.state):
                return None
        return found

    def _hide(self, what: str, path: Path_, name: bytes) -> None:
        if any(touched[: len(path)] == path for touched in self._touched):
            return
        folder, _, last = name.rpartition(b"/")
        prefix = folder + b"/" if folder else b""
        if what == "whiteout":
            self.layers[-1].append(Item(prefix + b".wh." + last))
        elif self.state.get(path) == "folder":
            self.layers[-1].append(Item(name + b"/.wh..wh..opq"))
        self._remove(path, keep=what == "opaque")

    def _remove(self, path: Path_, keep: bool = False) -> None:
        for there in list(self.state):
            if there[: len(path)] == path and not (keep and there == path):
                del self.state[there]


def compare(stack: list[list[tuple[Any, ...]]], how: str, form: int) -> None:
    layers = Stack()
    for steps in stack:
        layers.begin()
        for step in steps:
            layers.step(*step)
    note(repr(layers.layers))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        squashfs = made(
            root,
            [tar(items, form if not any(i.xattrs for i in items) else tarfile.PAX_FORMAT) for items in layers.layers],
            how=how,
        )
        ours = tree(unsquashed(squashfs, root / "ours"))
        command = ["umoci", "raw", "unpack", "--image", f"{root / 'oci'}:image", str(root / "theirs")]
        finished = subprocess.run(command, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        theirs = tree(root / "theirs")
        shutil.rmtree(root / "theirs")
    assert ours == theirs


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(STACKS, st.sampled_from(["gzip", "tar"]), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
def test_same_as_umoci(stack: list[list[tuple[Any, ...]]], how: str, form: int) -> None:
    compare(stack, how, form)


@pytest.mark.full
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(STACKS, st.sampled_from(["gzip", "tar"]), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
def test_same_as_umoci_for_long(stack: list[list[tuple[Any, ...]]], how: str, form: int) -> None:
    compare(stack, how, form)
