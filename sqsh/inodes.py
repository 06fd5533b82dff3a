"""The final tree as squashfs inodes, with what enroot adds to an image and how it sets owners and modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from sqsh import squashfs
from sqsh.errors import BadImage
from sqsh.file_data import FileData
from sqsh.squashfs import Inode
from sqsh.tar import BLOCK_DEVICE, CHAR, FIFO, FILE, SYMLINK, Member
from sqsh.tree import Folder, Node

MAX_LINKS = 40
KINDS = {
    FILE: squashfs.FILE, SYMLINK: squashfs.SYMLINK, CHAR: squashfs.CHAR,
    BLOCK_DEVICE: squashfs.BLOCK_DEVICE, FIFO: squashfs.FIFO,
}  # fmt: skip


def inode_tree(root: Folder, epoch: int, *, keep_owner: bool, keep_modes: bool) -> Inode:
    """Inodes for all that shows. Folders that no layer states get mode 755, root as owner and `epoch`."""

    def make(kind: int, member: Member, content: dict[bytes, Inode] | FileData | bytes | int) -> Inode:
        mode = member.mode if keep_modes else opened(kind, member.mode)
        uid, gid = (member.uid, member.gid) if keep_owner else (0, 0)
        return Inode(kind, mode, uid, gid, member.mtime, content, member.xattrs)

    def make_folder(folder: Folder) -> Inode:
        if folder.member is None:
            return Inode(squashfs.FOLDER, 0o755, 0, 0, epoch, {})
        return make(squashfs.FOLDER, folder.member, {})

    made: dict[int, Inode] = {}
    top = make_folder(root)
    stack = [(root, top)]
    while stack:
        folder, inode = stack.pop()
        children = inode.content
        assert isinstance(children, dict)
        for name, child in folder.children.items():
            if isinstance(child, Folder):
                children[name] = make_folder(child)
                stack.append((child, children[name]))
                continue
            node = child.real()
            if id(node) not in made:
                kind = KINDS[node.member.kind]
                mode = node.member.mode if node.member.kind != SYMLINK else 0o777
                made[id(node)] = make(kind, node.member, _content(node))
                if kind == squashfs.SYMLINK:
                    made[id(node)].mode = mode
            children[name] = made[id(node)]
    return top


def _content(node: Node) -> FileData | bytes | int:
    if node.member.kind == FILE:
        assert node.data is not None
        return node.data
    if node.member.kind == SYMLINK:
        return node.member.link
    major, minor = node.member.device
    return major << 8 | minor & 0xFF | (minor & ~0xFF) << 12


def opened(kind: int, mode: int) -> int:
    """u+rX, and u+w for folders: the user who owns the tree can read and extend it."""
    if kind == squashfs.FOLDER:
        return mode | 0o700
    return mode | 0o400 | (0o100 if mode & 0o111 else 0)


class StartedTree:
    """Changes a tree by path; symbolic links count from the tree's own root."""

    def __init__(self, root: Inode, epoch: int, store: Callable[[bytes], FileData]) -> None:
        self._root = root
        self._epoch = epoch
        self._store = store

    def write(self, path: str, content: bytes) -> None:
        """A plain file at `path`, in place of what is there (never of what a link there points to)."""
        where = PurePosixPath("/") / path
        folder = self._folder(str(where.parent))
        name = where.name.encode()
        there = folder.get(name)
        if there is not None and there.kind == squashfs.FOLDER:
            raise BadImage(f"the image has a folder at {where}, where a file must go", "rebuild the image without it")
        folder[name] = Inode(squashfs.FILE, 0o644, 0, 0, self._epoch, self._store(content))

    def make_folder(self, path: str) -> None:
        """`path` and its parents; what exists stays, even if it is no folder."""
        try:
            self._folder(path)
        except _NoFolder:
            return

    def empty(self, path: str) -> None:
        """Remove what is in the folder `path`, if that is one."""
        assert isinstance(self._root.content, dict)
        there = self._root.content.get(path.encode())
        if there is not None and isinstance(there.content, dict):
            there.content.clear()

    def _folder(self, path: str) -> dict[bytes, Inode]:
        trail = [self._root]
        rest = _parts(path.encode(errors="surrogateescape"))
        links = 0
        while rest:
            part = rest.pop(0)
            if part == b"..":
                trail = trail[:-1] or trail
                continue
            here = trail[-1].content
            assert isinstance(here, dict)
            step = here.get(part)
            if step is None:
                if len(part) > 255:
                    raise _NoFolder(f"the image names a folder of {len(part)} bytes", "rebuild the image")
                step = here[part] = Inode(squashfs.FOLDER, 0o755, 0, 0, self._epoch, {})
            if isinstance(step.content, dict):
                trail.append(step)
            elif step.kind == squashfs.SYMLINK:
                links += 1
                if links > MAX_LINKS:
                    raise _NoFolder(
                        f"the image has a loop of symbolic links at /{path.strip('/')}", "rebuild the image without it"
                    )
                assert isinstance(step.content, bytes)
                trail = [self._root] if step.content.startswith(b"/") else trail
                rest = _parts(step.content) + rest
            else:
                raise _NoFolder(f"the image has no folder at {path}, where files must go", "rebuild the image")
        found = trail[-1].content
        assert isinstance(found, dict)
        return found


class _NoFolder(BadImage):
    pass


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]
