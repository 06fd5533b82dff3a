"""Download every locked input, verified, to dist/inputs/PROFILE, so that the build needs no network.

Wheels come through pip with the machine's own configuration (index, mirror, CA), so no address is named here; pip
checks each against the lock's hashes, and the build checks them again as it installs them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from kit.bases import Base, read_archives, read_bases
from kit.command import Finished, run
from kit.errors import KitError
from kit.files import finished_file, sha256_of, write_atomic
from kit.layout import REPO, inputs_dir, nemo_rl_inputs, only_run, scratch_folder
from kit.lock import LockSet, lockfile, locks_of, nemo_rl_lock_of, requirements_for
from kit.steps import Step, complete_step, say, size_text

# Files that no run reads; together a fifth of the base.
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")


class Inputs(BaseModel):
    """inputs.json: which files the folder holds, and for which locks and base they were fetched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    locks: dict[str, str]
    """Lockfile name → sha256."""
    wheels: dict[str, int]
    """Wheel → size; each one's hash is in the locks."""
    archives: dict[str, str] = {}
    """Archive → sha256."""
    base: Base
    base_sha256: str | None = None
    base_size: int = 0
    base_how: str = ""
    """Hash of the options the base was made with; an earlier version of the kit may have used others."""
    base_packages: dict[str, str] = {}
    """Debian package → version."""


def fetch_inputs(profile: str, *, nemo_rl: bool = False) -> Inputs:
    """Fetch what is missing, write inputs.json and return it; files that are there and still match are kept.

    With `nemo_rl` also what NeMo RL needs besides, to a folder of its own; the answer is then of both.
    """
    folder = inputs_dir(profile)
    with only_run(f"fetch-{profile}"), complete_step(f"Fetch the inputs of {profile}") as step:
        bases = read_bases()
        base = _possible_here(profile, bases.of(profile))
        inputs = _fetch(folder, locks_of(profile), (), base, bases.source_date_epoch, step)
        if not nemo_rl:
            return inputs
        base = bases.for_nemo_rl(base).model_copy(update={"archives": ()})
        lock = nemo_rl_lock_of(profile)
        with complete_step("Inputs of NeMo RL") as step:
            more = _fetch(nemo_rl_inputs(profile), (lock,), locks_of(profile), base, bases.source_date_epoch, step)
        update = {
            "locks": inputs.locks | more.locks,
            "wheels": inputs.wheels | more.wheels,
            "archives": inputs.archives,
        }
        return more.model_copy(update=update)


def _fetch(
    folder: Path, locks: tuple[LockSet, ...], there_for: tuple[LockSet, ...], base: Base, epoch: int, step: Step
) -> Inputs:
    """Fill one folder. The packages of the locks in `there_for` lie elsewhere already."""
    hashes = {lock.name: sha256_of(lockfile(lock.name)) for lock in (*locks, *there_for)}
    there = _read(folder)
    wanted = Inputs(locks=hashes, wheels={}, base=base, base_how=_base_how(base, epoch))
    if there is not None and _same_request(there, wanted) and _complete(folder, there):
        step.note("all there, reused")
        return there
    reused = there is not None and there.base_how == wanted.base_how and _base_complete(folder, there)
    if base.suite is not None and not reused and os.geteuid() != 0:
        raise KitError("only root can make the base", "run it as root")
    wheels = _fetch_wheels(locks, there_for, base, folder / "wheels")
    archives = _fetch_archives(base, folder / "archives")
    manifest = wanted.model_copy(update={"wheels": wheels, "archives": archives})
    if base.suite is not None:
        if there is not None and reused:
            say("base: there, reused")
            packages, digest = there.base_packages, there.base_sha256
        else:
            packages = _make_base(base, epoch, folder / "base.tar")
            digest = sha256_of(folder / "base.tar")
        size = (folder / "base.tar").stat().st_size
        update = {"base_packages": packages, "base_sha256": digest, "base_size": size}
        manifest = manifest.model_copy(update=update)
    write_atomic(folder / "inputs.json", manifest.model_dump_json(indent=1, exclude_none=True) + "\n")
    step.note(size_text(sum(wheels.values()) + manifest.base_size))
    return manifest


def _possible_here(profile: str, base: Base) -> Base:
    """The base that this machine can use: made by mmdebstrap, or else the published image."""
    if base.suite is not None and shutil.which("mmdebstrap") and shutil.which("apt-get"):
        return base.model_copy(update={"image": None})
    if base.image is None:
        raise KitError(f"the base of '{profile}' needs mmdebstrap", "run ci/bootstrap.sh --yes on a Debian machine")
    return base.model_copy(update={"suite": None})


def _read(folder: Path) -> Inputs | None:
    try:
        return Inputs.model_validate_json((folder / "inputs.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None  # never fetched, not finished, or written by another version of the kit: fetch again


def _same_request(there: Inputs, wanted: Inputs) -> bool:
    return (there.locks, there.base, there.base_how) == (wanted.locks, wanted.base, wanted.base_how)


def _complete(folder: Path, manifest: Inputs) -> bool:
    sizes = {path.name: path.stat().st_size for path in _wheels(folder / "wheels")}
    if sizes != manifest.wheels or not (folder / "archives").is_dir():
        return False
    archives = {path.name: sha256_of(path) for path in (folder / "archives").iterdir()}
    return archives == manifest.archives and (manifest.base.suite is None or _base_complete(folder, manifest))


def _base_complete(folder: Path, manifest: Inputs) -> bool:
    tar = folder / "base.tar"
    return tar.exists() and tar.stat().st_size == manifest.base_size and sha256_of(tar) == manifest.base_sha256


def _wheels(folder: Path) -> list[Path]:
    """And the source packages among them."""
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])


def _fetch_wheels(
    locks: tuple[LockSet, ...], there_for: tuple[LockSet, ...], base: Base, folder: Path
) -> dict[str, int]:
    """Fill `folder` with exactly the wheels of these locks that the base's Python on this machine takes."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: set[str] = set()
    asked = {requirement for lock in there_for for requirement in _requirements(lockfile(lock.name), base)}
    for lock in locks:
        with complete_step(f"Wheels of {lock.name}") as step:
            before = {path.name for path in _wheels(folder)}
            requirements = (
                _requirements(lockfile(lock.name), base) - asked
            )  # those of an earlier lock have been downloaded
            asked |= requirements
            names = _pip_download(requirements, lock.built, base, folder) if requirements else set()
            wanted |= names
            step.moved(sum((folder / wheel).stat().st_size for wheel in names - before))
            step.note(f"{len(names)} wheels, {len(names - before)} new")
    for path in _wheels(folder):
        if path.name not in wanted:
            path.unlink()
    return {path.name: path.stat().st_size for path in _wheels(folder)}


def _requirements(lock: Path, base: Base) -> set[str]:
    """Each requirement of the lock with its hashes."""
    return set(re.split(r"\n(?=\S)", requirements_for(lock, base.python).rstrip("\n"))) - {""}


def _pip_download(requirements: set[str], built: str | None, base: Base, folder: Path) -> set[str]:
    """Download what is missing and return the names of all requested wheels; those in `folder` are only hashed."""
    with scratch_folder("fetch") as scratch:
        (scratch / "requirements.txt").write_text("\n".join(sorted(requirements)) + "\n")
        finished = _run_pip_download(scratch / "requirements.txt", built, base, folder, scratch)
    return set(_named_wheels(finished.stdout.splitlines()))


def _run_pip_download(requirements: Path, built: str | None, base: Base, folder: Path, scratch: Path) -> Finished:
    return run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-input",
            "--no-cache-dir",  # the folder is the cache
            "--progress-bar=off",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            *([f"--no-binary={built}"] if built is not None else []),
            "--implementation=cp",
            f"--python-version={base.python}",
            f"--abi=cp{base.python.replace('.', '')}",
            "--abi=abi3",
            "--abi=none",
            *(f"--platform={tag}" for tag in platform_tags(base.glibc)),
            f"--dest={folder}",
            f"--requirement={requirements}",
        ],
        env={"PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(scratch)},
        hint="check pip's index configuration (pip config list), then fetch again",
    )


def _named_wheels(lines: Iterable[str]) -> Iterable[str]:
    """The files pip says it saved or found: `Saved ./x.whl` and `File was already downloaded /…/x.whl`."""
    for line in lines:
        words = line.split()
        if words and words[-1].endswith((".whl", ".tar.gz")) and ("Saved" in words or "already" in words):
            yield os.path.basename(words[-1])  # noqa: PTH119  # a string, not a file


def _fetch_archives(base: Base, folder: Path) -> dict[str, str]:
    """Download the base's archives; one whose host cannot be reached is left out, as the base has a package of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fetched = {}
    for name in base.archives:
        archive = read_archives()[name]
        url, sha256 = archive.for_machine(platform.machine())
        target = folder / f"{name}-{archive.version}.tar.gz"
        with complete_step(f"Archive of {name} {archive.version}") as step:
            try:
                _download(url, sha256, target)
            except httpx.TransportError as error:
                step.note(f"out of reach ({error}); the base's own package serves instead")
                continue
            step.moved(target.stat().st_size)
            fetched[target.name] = sha256
    return fetched


def _download(url: str, sha256: str, target: Path) -> None:
    with finished_file(target) as part:
        with httpx.stream("GET", url, follow_redirects=True, timeout=30) as answer, part.open("wb") as file:
            if answer.status_code != 200:
                raise KitError(f"{url} answers {answer.status_code}", "check the address in lockfiles/archives.toml")
            for piece in answer.iter_bytes():
                file.write(piece)
        got = sha256_of(part)
        if got != sha256:
            raise KitError(f"{url} has sha256 {got}, but lockfiles/archives.toml pins {sha256}", "do not use it")


def platform_tags(glibc: str) -> list[str]:
    """Wheel platform tags that a machine like this one with `glibc` takes, best first."""
    machine = platform.machine()
    newest = int(glibc.split(".")[1])
    older = ("manylinux2014", "manylinux2010", "manylinux1", "linux")
    return [
        *(f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)),
        *(f"{tag}_{machine}" for tag in older),
    ]


def _base_options(base: Base) -> list[str]:
    return [
        "--mode=root",
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(base.packages)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        '--customize-hook=cp "$1/var/lib/dpkg/status" "$STATUS_COPY"',
        # This machine's own, and runtimes bring theirs.
        '--customize-hook=rm -f "$1/etc/resolv.conf" "$1/etc/hostname"',
        # The archive that this machine uses: another machine may use a mirror, and would make another image.
        '--customize-hook=: >"$1/etc/apt/sources.list"',
        # Times and host names in them would make each base another one.
        '--customize-hook=rm -rf "$1/var/log/apt" "$1"/var/log/*.log "$1/var/cache/ldconfig/aux-cache"',
    ]


def _base_how(base: Base, epoch: int) -> str:
    words = [str(epoch), str(base.suite), *_base_options(base)]
    return "" if base.suite is None else hashlib.sha256("\0".join(words).encode()).hexdigest()


def _make_base(base: Base, epoch: int, tar: Path) -> dict[str, str]:
    """Make the base's tar with mmdebstrap and return the packages in it; the same archive gives the same bytes."""
    assert base.suite is not None
    step_title = f"Base: Debian {base.suite}"
    with complete_step(step_title) as step, scratch_folder("base") as scratch, finished_file(tar) as part:
        sources = run([REPO / "ci/suite.sh", "sources", base.suite]).stdout
        run(
            ["mmdebstrap", "--quiet", *_base_options(base), base.suite, part, "-"],
            stdin=sources,
            env={"SOURCE_DATE_EPOCH": str(epoch), "STATUS_COPY": str(scratch / "status"), "TMPDIR": str(scratch)},
            hint="see that apt-get update works on this machine",
        )
        packages = dict(_installed((scratch / "status").read_text()))
        step.note(f"{len(packages)} packages, {size_text(part.stat().st_size)}")
        return packages


def _installed(dpkg_status: str) -> Iterable[tuple[str, str]]:
    for paragraph in dpkg_status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if "Package" in fields:
            yield fields["Package"], fields["Version"]
