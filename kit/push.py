"""Copy an image's bytes to a registry, then compare the digest that the registry reports."""

from __future__ import annotations

import os

from kit.command import run
from kit.errors import KitError
from kit.layout import release
from kit.oci import layout_image, registry_digest, tls_option
from kit.record import PushSection, add_section, read_record
from kit.services import registry, share_blobs
from kit.steps import complete_step, say


def push_image(name: str, reference: str = "") -> PushSection:
    """Push `dist/NAME/oci` to `reference` (registry/repository:tag), or to REGISTRY, or to our own registry."""
    target = release(name)
    record = read_record(target.record)
    there = layout_image(target.oci).digest
    if there != record.image.digest:
        raise KitError(
            f"{target.oci} holds {there}, but the record says {record.image.digest}",
            f"remove {target.folder} and make the image again",
        )
    ours = not reference and not os.environ.get("REGISTRY")
    reference = reference.removeprefix("docker://") or f"{os.environ.get('REGISTRY') or registry()}/nemo-rl:{name}"
    with complete_step(f"Push to {reference}") as step:
        run(
            [
                "skopeo",
                "copy",
                "--quiet",
                "--preserve-digests",
                *tls_option(reference, "--dest-tls-verify"),
                f"oci:{target.oci}",
                f"docker://{reference}",
            ],
            hint="check the address, that the registry is up, and `skopeo login`",
        )
        step.moved(record.image.size)
        there = registry_digest(reference)
        if there != record.image.digest:
            raise KitError(f"{reference} answers {there}, not {record.image.digest}", "push again; the tag was moved")
        step.note(there)
        if ours:
            share_blobs(target.oci)
    section = PushSection(reference=reference, digest=there)
    add_section(target.record, section, replace=True)
    if ours:
        say("the registry keeps running until ./build.py services stop")
    return section
