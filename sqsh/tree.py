"""The final tree of an image, built from its layers read top-down: what a layer above hides never comes in.

Each layer is first a tree of its own, in which the last of several entries of one path counts, and is then laid
beneath what the layers above have left. Whiteouts hide what lies in lower layers only, wherever in a layer they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from sqsh.blocks import FileData
from sqsh.errors import BadImage
from sqsh.tar import FILE, FOLDER, LINK, Member

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
RESERVED = b".wh..wh."

Path = tuple[bytes, ...]


class Node:
    """Whatever is no folder, once for all its names.

    `data` is None for a file whose content has been passed over so far; `number` is its member's place in the layer.
    A node with `below` stands for what that path is in the layers below, until `found` says what that is.
    """

    __slots__ = ("below", "data", "found", "member", "number")

    def __init__(self, member: Member, number: int) -> None:
        self.member = member
        self.number = number
        self.data: FileData | None = None
        self.below: Path | None = None
        self.found: Node | None = None

    def real(self) -> Node:
        node = self
        while node.found is not None:
            node = node.found
        return node


class Folder:
    """A folder of the final tree.

    `member` is None until a layer states the folder itself; `sealed`: nothing of it in lower layers shows; `hidden`:
    names that whiteouts hide in lower layers; `assumed`: the lowest layer seen so far took it for granted;
    `there`: some layer has an entry in it or for it, rather than whiteouts alone.
    """

    __slots__ = ("assumed", "children", "hidden", "member", "sealed", "there")

    def __init__(self) -> None:
        self.children: dict[bytes, Folder | Node] = {}
        self.member: Member | None = None
        self.sealed = False
        self.hidden: set[bytes] = set()
        self.assumed = False
        self.there = False


class LayerFolder:
    """A folder as one layer states it. `above` is the same folder in the final tree so far, if any.

    `masked`: what lies in it is hidden by layers above. `there`: as in the final tree.
    """

    __slots__ = ("above", "children", "hidden", "masked", "member", "opaque", "there")

    def __init__(self, above: Folder | None, masked: bool) -> None:
        self.above = above
        self.masked = masked
        self.children: dict[bytes, LayerFolder | Node] = {}
        self.hidden: set[bytes] = set()
        self.member: Member | None = None
        self.opaque = False
        self.there = False


class Tree:
    """Takes layers from the top one down."""

    def __init__(self) -> None:
        self.root = Folder()
        self._open: dict[Path, list[Node]] = {}  # hard links whose target a lower layer holds

    def layer(self, name: str) -> Layer:
        return Layer(name, self.root, self._open)

    def add(self, layer: Layer) -> list[Node]:
        """Lay a complete layer beneath the tree and return the files that show but whose content was passed over."""
        placed: list[Node] = []
        self._merge(layer, placed)
        self._resolve(layer, placed)
        for node in placed:
            if node.below is not None and node.found is None:
                waiting = self._open.setdefault(node.below, [])
                if node not in waiting:
                    waiting.append(node)
        missing = {id(node): node for node in placed if node.member.kind == FILE and node.data is None}
        return sorted((node for node in missing.values() if node.below is None), key=lambda node: node.number)

    def finish(self) -> None:
        """After the lowest layer: whatever is still open is nowhere."""
        for path in self._open:
            raise BadImage(f"a hard link names /{_text(path)}, which is in no layer below", "rebuild the image")
        self._prune()

    def _prune(self) -> None:
        """Drop folders that only whiteouts speak of."""
        found: list[tuple[Folder, bytes, Folder]] = []
        stack = [self.root]
        while stack:
            parent = stack.pop()
            for name, child in parent.children.items():
                if isinstance(child, Folder):
                    found.append((parent, name, child))
                    stack.append(child)
        for parent, name, child in reversed(found):
            if not child.there and not child.children:
                del parent.children[name]

    def _merge(self, layer: Layer, placed: list[Node]) -> None:
        stack: list[tuple[LayerFolder, Folder]] = [(layer.root, self.root)]
        while stack:
            lower, upper = stack.pop()
            if upper.member is None:
                upper.member = lower.member
            upper.assumed = lower.member is None
            upper.there = upper.there or lower.there
            if not upper.sealed:
                for name, child in lower.children.items():
                    if name in upper.hidden:
                        continue
                    there = upper.children.get(name)
                    if isinstance(child, Node):
                        if isinstance(there, Folder):
                            self._refuse_assumed(there, layer, name)
                            there.sealed = True
                        elif there is None:
                            upper.children[name] = child
                            placed.append(child)
                    elif isinstance(there, Folder):
                        stack.append((child, there))
                    elif there is None:
                        fresh = upper.children[name] = Folder()
                        stack.append((child, fresh))
            if lower.hidden:
                upper.hidden |= lower.hidden
            upper.sealed = upper.sealed or lower.opaque

    def _refuse_assumed(self, folder: Folder, layer: Layer, name: bytes) -> None:
        if folder.assumed:
            raise BadImage(
                f"a layer writes into {name!r} as a folder, which in the layer below ({layer.name}) is none",
                "writing through links is refused; rebuild the image",
            )

    def _resolve(self, layer: Layer, placed: list[Node]) -> None:
        """Find in this layer what hard links of the layers above name."""
        for path in list(self._open):
            target = layer.look_up(path)
            if target is None:
                continue
            for node in self._open.pop(path):
                node.found = target
            placed.append(target)


class Layer:
    """One layer while it is read."""

    def __init__(self, name: str, above: Folder, open_links: dict[Path, list[Node]]) -> None:
        self.name = name
        self.root = LayerFolder(above, above.sealed)
        self._open = open_links
        self._links: dict[Path, Node] = {}
        self._last: tuple[Path, LayerFolder] = ((), self.root)

    def add(self, node: Node) -> bool:
        """Take one entry in. The answer is whether it is a file whose content is wanted now."""
        member = node.member
        path = member.path
        if not path:
            if member.kind != FOLDER:
                self._refuse(path, "gives the root another type")
            self.root.member = member
            return False
        name = path[-1]
        if b".wh." in name and self._whiteout(path, name):
            return False
        parent = self._parent(path[:-1])
        if member.kind == FOLDER:
            stated = self._folder(parent, name)
            stated.member, stated.there = member, True
            return False
        there = parent.children.get(name)
        if isinstance(there, LayerFolder):
            parent.hidden.add(name)  # whatever takes its place later in this layer, lower content is gone
        if member.kind == LINK:
            parent.children[name] = self._link(member.target, node)
            return False
        parent.children[name] = node
        return member.kind == FILE and (self._shows(parent, name) or path in self._open)

    def look_up(self, path: Path) -> Node | None:
        """What hard links of layers above mean by `path`: None if a lower layer has to say."""
        folder = self.root
        closed = False
        for depth, name in enumerate(path, 1):
            closed = closed or folder.opaque or name in folder.hidden
            child = folder.children.get(name)
            if child is None and not closed:
                return None
            if isinstance(child, Node) and depth == len(path):
                return child
            if not isinstance(child, LayerFolder) or depth == len(path):
                self._refuse(path, "hides what a hard link above names:")
            folder = child
        return None

    def _shows(self, parent: LayerFolder, name: bytes) -> bool:
        if parent.masked:
            return False
        above = parent.above
        return above is None or (name not in above.hidden and name not in above.children)

    def _parent(self, path: Path, there: bool = True) -> LayerFolder:
        """The folder `path`, made as far as it is missing; `there` is False for a whiteout's."""
        if path == self._last[0] and (self._last[1].there or not there):
            return self._last[1]
        folder = self.root
        for name in path:
            if name.startswith(WHITEOUT):
                self._refuse(path, "has a whiteout for a folder:")
            child = folder.children.get(name)
            if isinstance(child, Node):
                self._refuse(path, "writes through what is no folder:")
            folder = child if child is not None else self._new(folder, name)
            folder.there = folder.there or there
        self._last = (path, folder)
        return folder

    def _folder(self, parent: LayerFolder, name: bytes) -> LayerFolder:
        child = parent.children.get(name)
        if isinstance(child, LayerFolder):
            return child
        folder = self._new(parent, name)
        if child is not None:
            parent.hidden.add(name)
        return folder

    def _new(self, parent: LayerFolder, name: bytes) -> LayerFolder:
        above: Folder | None = None
        masked = parent.masked
        if not masked and parent.above is not None:
            there = parent.above.children.get(name)
            if name in parent.above.hidden or isinstance(there, Node):
                masked = True
            elif there is not None:
                above = there
                masked = there.sealed
        folder = parent.children[name] = LayerFolder(above, masked)
        return folder

    def _whiteout(self, path: Path, name: bytes) -> bool:
        if name == OPAQUE:
            self._parent(path[:-1], there=False).opaque = True
            return True
        if name.startswith(RESERVED):
            return True  # bookkeeping of an old storage driver
        if not name.startswith(WHITEOUT):
            return False
        hidden = name[len(WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            self._refuse(path, "has a whiteout of no name:")
        self._parent(path[:-1], there=False).hidden.add(hidden)
        return True

    def _link(self, target: Path, link: Node) -> Node:
        here: LayerFolder | Node = self.root
        for name in target:
            if isinstance(here, Node):
                self._refuse(target, "has a hard link through what is no folder:")
            child = here.children.get(name)
            if child is None:
                return self._link_below(target, link)
            here = child
        if isinstance(here, LayerFolder):
            self._refuse(target, "has a hard link to a folder:")
        return here

    def _link_below(self, target: Path, link: Node) -> Node:
        """All links of this layer to one path below are one node."""
        node = self._links.setdefault(target, link)
        node.below = target
        return node

    def _refuse(self, path: Path, what: str) -> NoReturn:
        raise BadImage(f"the layer {self.name} {what} /{_text(path)}", "it is damaged or hostile; nothing was written")


def _text(path: Iterable[bytes]) -> str:
    return b"/".join(path).decode(errors="backslashreplace")


def walk(root: Folder) -> Iterator[tuple[Path, Folder | Node]]:
    """Every entry below `root`, folders before what lies in them, by name."""
    stack: list[tuple[Path, Folder | Node]] = [((), root)]
    while stack:
        path, entry = stack.pop()
        if path:
            yield path, entry
        if isinstance(entry, Folder):
            stack += [((*path, name), entry.children[name]) for name in sorted(entry.children, reverse=True)]
