"""The final tree of an image, built from its layers read top-down: what a layer above hides never comes in.

Each layer is first a tree of its own, in which the last of several entries of one path counts, and is then laid
beneath what the layers above have left. Whiteouts hide what lies in lower layers only, wherever in a layer they stand.

A layer may have entries below a folder that it does not state, and a layer below have a symbolic link there: then they
belong to where the link leads, within the image. That is known only once the link is read, so all layers down to it are
then laid anew from the entries read so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn

from sqsh.errors import BadImage
from sqsh.file_data import FileData
from sqsh.tar import FILE, FOLDER, LINK, MAX_NAME, SYMLINK, Member

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
RESERVED = b".wh..wh."
NONE: frozenset[bytes] = frozenset()
MAX_LINKS = 40  # on one path, as Linux has it
MAX_TURNS = 256  # how often an image's layers are laid anew

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

    `masked`: what lies in it is hidden by layers above. `there`: as in the final tree. `hidden`: names whose content in
    lower layers is gone, by one of the `whiteouts` or by an entry of another type. `fresh`: so is the folder's own.
    """

    __slots__ = ("above", "children", "fresh", "hidden", "masked", "member", "opaque", "there", "whiteouts")

    def __init__(self, above: Folder | None, masked: bool, fresh: bool = False) -> None:
        self.fresh = fresh
        self.above = above
        self.masked = masked
        self.children: dict[bytes, LayerFolder | Node] = {}
        self.hidden: set[bytes] = set()
        self.member: Member | None = None
        self.opaque = False
        self.there = False
        self.whiteouts: frozenset[bytes] = NONE

    def loses(self, name: bytes) -> bool:
        """Whether what lower layers have in it by that name is gone, as far as is known."""
        return self.fresh or self.opaque or name in self.hidden


class _Taken:
    """A folder that layers take for granted, by their numbers, and what they so take within it."""

    __slots__ = ("children", "layers")

    def __init__(self) -> None:
        self.children: dict[bytes, _Taken] = {}
        self.layers: list[int] = []

    def add(self, path: Path, layer: int) -> None:
        here = self
        for name in path:
            here = here.children.setdefault(name, _Taken())
        if layer not in here.layers:
            here.layers.append(layer)

    def settle(self, layer: Layer) -> dict[int, dict[Path, bytes]]:
        """Forget what `layer` says to be a folder or nothing. What it says to be a link: target by layer and path."""
        found: dict[int, dict[Path, bytes]] = {}
        stack: list[tuple[Path, _Taken, LayerFolder, bool]] = [((), self, layer.root, False)]
        while stack:
            path, taken, folder, closed = stack.pop()
            for name, below in list(taken.children.items()):
                there = folder.children.get(name)
                ends = closed or folder.opaque or name in folder.hidden  # what lower layers have there is gone
                if isinstance(there, LayerFolder):
                    if ends or there.member is not None:
                        below.layers.clear()
                    stack.append(((*path, name), below, there, ends))
                    continue
                if isinstance(there, Node) and there.member.kind == SYMLINK:
                    for number in below.layers:
                        found.setdefault(number, {})[(*path, name)] = there.member.link
                if there is not None or ends:
                    del taken.children[name]
        return found


class Tree:
    """Takes layers from the top one down. `check` is called now and then where that takes long."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._layers: list[Layer] = []
        self._links: list[dict[Path, bytes]] = []  # for each layer: folders of its that are links below
        self._turns = 0
        self._clear()

    def _clear(self) -> None:
        self.root = Folder()
        self._open: dict[Path, list[Node]] = {}  # hard links whose target a lower layer holds
        self._taken = _Taken()

    def layer(self, name: str) -> Layer:
        number = len(self._layers)
        return Layer(name, self.root, self._open, self._links[number] if number < len(self._links) else {})

    def add(self, layer: Layer) -> dict[int, list[Node]]:
        """Lay a complete layer beneath the tree and return the files that show but whose content was passed over, for
        each layer concerned, by its number from the top."""
        self._layers.append(layer)
        self._links.append({})
        links = self._taken.settle(layer)
        if not links:
            return {len(self._layers) - 1: self._lay(layer)}
        missing: dict[int, list[Node]] = {}
        while links:
            self._learn(links, layer.name)
            links, missing = self._lay_anew()
        return missing

    def _learn(self, links: Mapping[int, Mapping[Path, bytes]], name: str) -> None:
        self._turns += 1
        for number, found in links.items():
            if self._turns > MAX_TURNS or found.keys() & self._links[number].keys():
                raise BadImage(
                    f"the layer {name} has links without end for folders of the layers above",
                    "rebuild the image without them",
                )
            self._links[number].update(found)

    def _lay_anew(self) -> tuple[dict[int, dict[Path, bytes]], dict[int, list[Node]]]:
        """Links that turn up only now, which leaves this unfinished; else the files that `add` returns."""
        before, self._layers = self._layers, []
        missing: dict[int, list[Node]] = {}
        self._clear()
        for number, read in enumerate(before):
            self._check()
            layer = self.layer(read.name)
            for node in read.nodes:
                node.below = node.found = None
                layer.add(node)
            self._layers.append(layer)
            if links := self._taken.settle(layer):
                self._layers += before[number + 1 :]
                return links, {}
            missing[number] = self._lay(layer)
        return {}, missing

    def _lay(self, layer: Layer) -> list[Node]:
        for path in layer.taken():
            self._taken.add(path, len(self._layers) - 1)
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
        """After the lowest layer: whatever is still open is nowhere, and what was a fault is one."""
        for fault in filter(None, (layer.fault for layer in self._layers)):
            raise fault
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
                            if there.assumed:
                                layer.fault = layer.fault or _no_folder(layer, name)
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

    def _resolve(self, layer: Layer, placed: list[Node]) -> None:
        """Find in this layer what hard links of the layers above name."""
        for path in list(self._open):
            try:
                target = layer.look_up(path)
            except _Unsettled as error:
                layer.fault = layer.fault or error
                del self._open[path]
                continue
            if target is None:
                continue
            for node in self._open.pop(path):
                node.found = target
            placed.append(target)


class Layer:
    """One layer while it is read. `links`: targets of what it takes for folders and layers below have as links."""

    def __init__(
        self, name: str, above: Folder, open_links: dict[Path, list[Node]], links: Mapping[Path, bytes]
    ) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.fault: BadImage | None = None  # if it is one in the end
        self.root = LayerFolder(above, above.sealed)
        self._open = open_links
        self._links_below = links
        self._links: dict[Path, Node] = {}
        self._reserved: dict[Path, Node] = {}  # files of aufs's own, which only hard links can bring into the image
        self._assumed: list[Path] = []
        self._last: tuple[Path, LayerFolder] = ((), self.root)

    def add(self, node: Node) -> bool:
        """Take one entry in. The answer is whether it is a file whose content is wanted now."""
        self.nodes.append(node)
        try:
            return self._add(node)
        except _Unsettled as error:
            self.fault = self.fault or error
            return False

    def _add(self, node: Node) -> bool:
        member = node.member
        path = member.path
        if not path:
            if member.kind != FOLDER:
                self._refuse(path, "gives the root another type")
            self.root.member = member
            return False
        if path[0].startswith(RESERVED) and path[0] != OPAQUE:
            if member.kind == FILE:
                self._reserved[path] = node
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
            closed = closed or folder.loses(name)
            child = folder.children.get(name)
            if isinstance(child, Node) and depth == len(path):
                return child
            if not closed and (child is None or (depth == len(path) and not _is_stated(child))):
                return None
            if not isinstance(child, LayerFolder) or depth == len(path):
                raise _Unsettled(*self._complaint(path, "hides what a hard link above names:"))
            folder = child
        return None

    def _shows(self, parent: LayerFolder, name: bytes) -> bool:
        if parent.masked:
            return False
        above = parent.above
        return above is None or (name not in above.hidden and name not in above.children)

    def taken(self) -> Iterator[Path]:
        """Folders that this layer took for granted when it had something in them, whatever it says of them later."""
        yield from (path for path in self._assumed if not self._takes_away(path))
        for target in self._links:
            for depth in range(1, len(target)):
                here = self._find(target[:depth])
                if not (
                    (isinstance(here, LayerFolder) and here.member is not None) or self._takes_away(target[:depth])
                ):
                    yield target[:depth]

    def _takes_away(self, path: Path) -> bool:
        """Whether a whiteout here hides what lower layers have at `path`."""
        here = self.root
        for name in path:
            if here.opaque or name in here.whiteouts:
                return True
            child = here.children.get(name)
            if not isinstance(child, LayerFolder):
                return False
            here = child
        return False

    def _parent(self, path: Path, there: bool = True) -> LayerFolder:
        """The folder `path`, made as far as it is missing; `there` is False for a whiteout's."""
        if path == self._last[0] and (self._last[1].there or not there):
            return self._last[1]
        found = self._make(path, there) if not self._links_below else None
        if found is None:
            found = self._make(self._real(path, "writes through what is no folder:"), there)
            assert found is not None
        self._last = (path, found)
        return found

    def _make(self, path: Path, there: bool) -> LayerFolder | None:
        """None where a link or a file is in the way."""
        folder = self.root
        for depth, name in enumerate(path, 1):
            if name.startswith(WHITEOUT):
                self._refuse(path, "has a whiteout for a folder:")
            child = folder.children.get(name)
            if isinstance(child, Node):
                return None
            if child is None:
                child = self._new(folder, name)
                if not child.fresh:
                    self._assumed.append(path[:depth])
            folder = child
            folder.there = folder.there or there
        return folder

    def _real(self, path: Path, fault: str) -> Path:
        """`path` without links, as far as these are known."""
        names: list[bytes] = []
        folders: list[LayerFolder | None] = [self.root]
        rest = list(reversed(path))
        links = 0
        while rest:
            name = rest.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if names:
                    self._assumed.append(tuple(names))
                    names.pop()
                    folders.pop()
                continue
            here = folders[-1]
            child = here.children.get(name) if here is not None else None
            target: bytes | None = None
            if isinstance(child, Node):
                if child.member.kind != SYMLINK:
                    raise _Unsettled(*self._complaint(path, fault))
                target = child.member.link
            elif not _is_stated(child) and not (here is not None and here.loses(name)):
                target = self._links_below.get((*names, name))
            if target is None:
                names.append(name)
                folders.append(child if isinstance(child, LayerFolder) else None)
                continue
            links += 1
            if links > MAX_LINKS:
                self._refuse(path, "goes through links without end:")
            if max(map(len, target.split(b"/"))) > MAX_NAME:
                self._refuse(path, "goes through a link to a name that Linux does not allow:")
            if target.startswith(b"/"):
                names, folders = [], [self.root]
            rest += reversed(target.split(b"/"))
        return tuple(names)

    def _folder(self, parent: LayerFolder, name: bytes) -> LayerFolder:
        child = parent.children.get(name)
        if isinstance(child, LayerFolder):
            return child
        folder = self._new(parent, name)
        if child is not None:
            parent.hidden.add(name)
            folder.fresh = True
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
        folder = parent.children[name] = LayerFolder(above, masked, parent.loses(name))
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
        parent = self._parent(path[:-1], there=False)
        parent.hidden.add(hidden)
        parent.whiteouts |= {hidden}
        return True

    def _link(self, target: Path, link: Node) -> Node:
        if target in self._reserved:
            return self._reserved[target]
        here = self._find(target)
        if self._links_below or not isinstance(here, Node):
            target = (*self._real(target[:-1], "has a hard link through what is no folder:"), *target[-1:])
            here = self._find(target)
        if not target or _is_stated(here):
            raise _Unsettled(*self._complaint(target, "has a hard link to a folder:"))
        return here if isinstance(here, Node) else self._link_below(target, link)

    def _find(self, path: Path) -> LayerFolder | Node | None:
        """What this layer itself has at `path`."""
        here: LayerFolder | Node | None = self.root
        for name in path:
            if not isinstance(here, LayerFolder):
                return None
            here = here.children.get(name)
        return here

    def _link_below(self, target: Path, link: Node) -> Node:
        """All links of this layer to one path below are one node."""
        node = self._links.setdefault(target, link)
        node.below = target
        return node

    def _refuse(self, path: Path, what: str) -> NoReturn:
        raise BadImage(*self._complaint(path, what))

    def _complaint(self, path: Path, what: str) -> tuple[str, str]:
        return f"the layer {self.name} {what} /{_text(path)}", "it is damaged or hostile; nothing was written"


class _Unsettled(BadImage):
    """A fault that a link in a lower layer may yet explain: what is in the way may belong elsewhere."""


def _no_folder(layer: Layer, name: bytes) -> BadImage:
    what = f"a layer writes into {name!r} as a folder, which in the layer below ({layer.name}) is none"
    return BadImage(what, "rebuild the image")


def _is_stated(here: LayerFolder | Node | None) -> bool:
    return isinstance(here, LayerFolder) and here.member is not None


def _text(path: Iterable[bytes]) -> str:
    return b"/".join(path).decode(errors="backslashreplace")
