"""What the kit's runner does for a user without root, who can neither mount a squashfs nor make namespaces but in a
user namespace of their own: mount it with squashfuse there, or unpack it where that cannot be done.

Standard library only, as kit/run.py is: see kit/node_run.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.errors import KitError

OVERLAY_SINCE = (5, 11)  # Linux: overlays in user namespaces


def check_user_namespaces() -> None:
    """Raise KitError where this user cannot make what a container consists of."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"]
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode != 0:
        raise KitError(
            f"user namespaces are not allowed here ({finished.stderr.strip()})",
            "install enroot, or allow them: user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns",
        )


@contextmanager
def prepared_root(squashfs: Path, state: Path) -> Iterator[Path | None]:
    """Yield None where the first process of the container can mount the squashfs, else a folder with its content, which
    is removed at the end."""
    reason = why_not_mounted()
    if reason is None:
        yield None
        return
    if shutil.which("unsquashfs") is None:
        raise KitError(f"{reason}, and unsquashfs is not installed", "install squashfuse, or squashfs-tools")
    state.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="container-", dir=state))
    try:
        print(f"note: {reason}: unpacking {squashfs} into {folder}", file=sys.stderr)
        words = ["unsquashfs", "-no-progress", "-no-xattrs", "-force", "-dest", str(folder), str(squashfs)]
        finished = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if finished.returncode != 0:
            raise KitError(
                f"unsquashfs failed: {' | '.join(finished.stderr.split(chr(10))[-3:])}", f"see {folder.parent}"
            )
        yield folder
    finally:
        _remove(folder)


def why_not_mounted() -> str | None:
    """Why a container of this user cannot mount a squashfs here, if it cannot."""
    if shutil.which("squashfuse") is None:
        return "squashfuse is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not there for this user"
    major, minor = (int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if (major, minor) < OVERLAY_SINCE:
        return f"Linux {major}.{minor} allows users no overlay"
    return None


def _remove(folder: Path) -> None:
    # Not rmtree: an image may have folders that their owner cannot write to.
    subprocess.run(["chmod", "-R", "u+rwX", folder], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
