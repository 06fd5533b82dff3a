"""`release.json`: what the host knows of a release and the image cannot: for the pages of a run in it."""

from __future__ import annotations

import json
from pathlib import Path

from kit.command import run
from kit.errors import KitError
from kit.files import write_atomic
from kit.layout import REPO
from kit.record import Record

FACTS = "release.json"


def write_facts(record: Record, path: Path, hashed: str = "right before the run") -> None:
    """For the folder that a run's results go to, before it starts. `hashed`: when the squashfs was, for people."""
    facts = {
        "commit": record.image.commit,
        "image_digest": record.image.digest,
        "inputs": record.image.inputs,
        "reference": record.push.reference if record.push else None,
        "sqsh_sha256": record.sqsh.sha256 if record.sqsh else None,
        "sqsh_hashed": hashed,
    }
    write_atomic(path, json.dumps(facts, indent=2) + "\n")


def checked_out_commit() -> str | None:
    """Of this checkout, with `-dirty` where a file differs from it; nothing outside a git checkout of the kit."""
    try:
        top = run(["git", "-C", REPO, "rev-parse", "--show-toplevel"], check=False)
        if top.returncode or Path(top.stdout.strip()) != REPO:
            return None
        words = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return run(["git", "-C", REPO, *words]).stdout.strip()
    except KitError:
        return None
