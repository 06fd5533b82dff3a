"""Build the image into an OCI layout; the layout's digest is the release's identity."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

from kit.bases import read_bases
from kit.command import run
from kit.errors import KitError
from kit.fetch import Inputs, fetch_inputs
from kit.files import need_space, tree_size, write_atomic
from kit.layout import REPO, Release, inputs_dir, only_run, release, state_dir
from kit.lock import check_pins
from kit.nemo_rl import Checkout, tree_to_build
from kit.oci import blob, image_size, layout_image, read_manifest
from kit.record import ImageSection, NemoRl, read_record, start_record
from kit.release_facts import checked_out_commit
from kit.services import Docker, check_engine, content_store, engine
from kit.sources import input_hashes
from kit.steps import complete_step, size_text

# Docker's media types, as Debian's registry refuses OCI ones to clients that send no Accept header, and enroot is one.
# The fastest gzip level: what has to be small is the squashfs, not these layers. No rewrite-timestamp, as
# docker/clamp-times.sh does that in the steps themselves.
_HOW = "oci-mediatypes=false,compression=gzip,compression-level=1"


def make_image(
    name: str, profile: str, *, with_dynamo: bool = True, nemo_rl: Path | None = None, lean: bool = False
) -> ImageSection:
    """Build `dist/NAME/oci` from the profile's inputs and start the record; reuse the image there if nothing changed.

    nemo_rl: a clone of NeMo RL, which goes in with an environment of its own; another folder counts as none.
    `lean` then removes our engine's build cache: it frees 11 GB, and the next build takes minutes longer.
    """
    target = release(name)
    inputs_dir(profile)
    tree = tree_to_build(nemo_rl)
    check_pins()
    check_engine()
    inputs = fetch_inputs(profile, nemo_rl=tree is not None)
    # One build at a time, whatever its name: the first to end would stop the engine that the other uses.
    with only_run("image"), complete_step(f"Image {name}") as step:
        hashes = _input_hashes(inputs, profile, with_dynamo, tree)
        key = _key(profile, with_dynamo, hashes)
        there = _unchanged(target, key)
        if there is not None:
            step.note(f"unchanged, reused {there.digest}")
            return there
        # The engine's copy of the wheels, what they unpack to (about twice that), and the compressed layer.
        need_space(state_dir(), 4 * (sum(inputs.wheels.values()) + inputs.base_size), "building the image")
        epoch = read_bases().source_date_epoch
        _build(target, profile, with_dynamo, tree, inputs, epoch, lean)
        if _input_hashes(inputs, profile, with_dynamo, tree_to_build(nemo_rl)) != hashes:
            raise KitError("the sources changed while the image was built from them", "build it again")
        image = layout_image(target.oci)
        manifest = read_manifest(target.oci, image.digest)
        section = ImageSection(
            name=name,
            profile=profile,
            digest=image.digest,
            media_type=image.media_type,
            size=image_size(image, manifest),
            layers=[layer.digest for layer in manifest.layers],
            key=key,
            inputs=hashes,
            source_date_epoch=epoch,
            commit=checked_out_commit(),
            nemo_rl=_nemo_rl_in(target) if tree is not None else None,
        )
        start_record(target.record, section)
        if section.nemo_rl is not None:
            step.note(f"with NeMo RL {section.nemo_rl.commit[:12]}: {size_text(section.nemo_rl.size)} more, unpacked")
        step.note(f"{len(section.layers)} layers, {size_text(section.size)}, {section.digest}")
        return section


def _unchanged(target: Release, key: str) -> ImageSection | None:
    """The recorded image, if it has this key and its blobs are all there in their full size."""
    if not target.record.exists():
        return None
    image = read_record(target.record).image
    if image.key != key:
        return None
    try:
        there = layout_image(target.oci)
        layers = read_manifest(target.oci, there.digest).layers
        whole = all(blob(target.oci, layer.digest).stat().st_size == layer.size for layer in layers)
    except (KitError, OSError):
        return None
    return image if whole and there.digest == image.digest else None


def _build(
    target: Release,
    profile: str,
    with_dynamo: bool,
    tree: Checkout | None,
    inputs: Inputs,
    epoch: int,
    lean: bool,
) -> None:
    part, earlier = target.folder / ".oci.part", target.folder / ".oci.old"
    shutil.rmtree(part, ignore_errors=True)
    target.folder.mkdir(parents=True, exist_ok=True)
    options = [
        f"--build-arg=PROFILE={profile}",
        f"--build-arg=LOCKS={inputs.base.locks or profile}",
        f"--build-arg=BUILD_DYNAMO={'1' if with_dynamo else ''}",
        *_base_options(inputs),
        f"--build-context=inputs={inputs_dir(profile)}",
        *([] if tree is None else ["--build-arg=NEMO_RL=1", f"--build-context=nemo-rl={tree.folder}"]),
    ]
    log = state_dir() / "logs" / f"image-{target.name}.log"
    log.unlink(missing_ok=True)
    try:
        with engine() as docker, complete_step("docker buildx build") as step:
            if not docker.own or not _take_from_store(docker, options, epoch, log, part):
                _buildx(docker, [*options, f"--output=type=oci,tar=false,{_HOW},dest={part}"], epoch, log)
            if docker.own and lean:
                run(docker.argv("builder", "prune", "--all", "--force"), env=docker.env)
            step.note(size_text(tree_size(part)))
        shutil.rmtree(earlier, ignore_errors=True)
        if target.oci.exists():
            target.oci.rename(earlier)
        part.rename(target.oci)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _base_options(inputs: Inputs) -> list[str]:
    if inputs.base.image is None:
        return ["--network=none"]
    packages = " ".join(inputs.base.packages)
    names = {"BASE_IMAGE": "published-base", "PUBLISHED_IMAGE": inputs.base.image, "BASE_PACKAGES": packages}
    return [f"--build-arg={name}={value}" for name, value in names.items()]


def _buildx(docker: Docker, options: list[str], epoch: int, log: Path) -> None:
    argv = docker.argv(
        "buildx",
        "build",
        "--file=docker/Dockerfile",
        "--target=release",
        "--progress=plain",
        "--provenance=false",  # it holds times, and would wrap the image in an index
        *options,
        ".",
    )
    env = {**docker.env, "SOURCE_DATE_EPOCH": str(epoch)}
    finished = run(argv, cwd=REPO, env=env, log=log, check=False)
    if finished.returncode != 0:
        raise KitError(f"docker buildx build failed: {failed_step(log.read_text(errors='replace'))}", f"see {log}")


def _take_from_store(docker: Docker, options: list[str], epoch: int, log: Path, layout: Path) -> bool:
    """Build with our own engine and make the layout of hard links to its blobs: without a second copy, and without
    streaming gigabytes through the client. The bytes are those that `type=oci` writes.

    With store=false the engine neither names nor unpacks the image, so garbage collection may remove the manifest
    before it is linked; the answer is then False.
    """
    metadata = log.with_suffix(".json")
    output = f"--output=type=image,name=localhost/dynamo-rl-kit,push=false,store=false,{_HOW}"
    _buildx(docker, [*options, f"--metadata-file={metadata}", output], epoch, log)
    digest = json.loads(metadata.read_text())["containerimage.digest"]
    store = content_store()
    try:
        manifest = json.loads(blob(store, digest).read_bytes())
        for part in (digest, manifest["config"]["digest"], *{layer["digest"] for layer in manifest["layers"]}):
            _link_or_copy(blob(store, part), blob(layout, part))
    except FileNotFoundError:
        shutil.rmtree(layout, ignore_errors=True)
        return False
    size = blob(layout, digest).stat().st_size
    descriptor = {"mediaType": manifest["mediaType"], "digest": digest, "size": size}
    write_atomic(layout / "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
    write_atomic(layout / "index.json", json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(source, target)


def failed_step(log: str) -> str:
    """The failing step's last output, which buildx repeats between two lines of dashes, else the log's last line."""
    quoted = log.rsplit("\n------\n", 2)
    said = quoted[1].splitlines()[1:] if len(quoted) == 3 else []
    lines = [line.strip() for line in said or log.splitlines() if line.strip()]
    return " | ".join(re.sub(r"^[0-9.]+ ", "", line).strip() for line in lines[-2:])[-400:] or "it printed nothing"


def _input_hashes(inputs: Inputs, profile: str, with_dynamo: bool, tree: Checkout | None) -> dict[str, str]:
    environments = ["trainer", *(["dynamo"] if with_dynamo else []), *(["nemo-rl"] if tree is not None else [])]
    try:
        hashes = input_hashes(REPO, environments, inputs.base.locks or profile, inputs.model_dump())
    except FileNotFoundError as error:
        raise KitError(f"{error.filename} is missing", "check out the whole repository") from None
    return hashes if tree is None else {**hashes, "nemo-rl": tree.commit}


def _key(profile: str, with_dynamo: bool, hashes: dict[str, str]) -> str:
    parts = {"profile": profile, "dynamo": with_dynamo, "epoch": read_bases().source_date_epoch, "inputs": hashes}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _nemo_rl_in(target: Release) -> NemoRl:
    """What the build itself says of the tree that it got."""
    from kit.build_json import build_json  # reading layers takes the converter, which a plain build does not

    return NemoRl.model_validate(build_json(target.oci)["nemo_rl"])
