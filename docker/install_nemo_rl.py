"""Put the tree of NeMo RL, if one was given, to /opt/nemo-rl, and what it expects of an image beside it.

    NEMO_RL=1 PYTHONPATH=TREE_OF_THE_KIT python3 -m docker.install_nemo_rl

The files are those of its commit, without submodules and without history. What is known of them is left in
/tmp/nemo-rl.json for build.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from docker.compile_bytecode import compile_share
from kit.nemo_tree import LAYOUT, MADE_FOR, TreeError, check_pins_of, is_nemo_rl, read_tree, sha256_of, write_commit

KIT = Path(__file__).parent.parent
MARKER = "VLLM_BACKPORTS"
# Of the Ray actors that NeMo RL gives an environment made by uv, those on the way of GRPO with Dynamo and DTensor.
ACTORS = (
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector",
    "nemo_rl.algorithms.async_utils.ReplayBuffer",
)
# A tree in the working folder is meant, where there is one: the documented job mounts it and runs there. PYTHONPATH
# comes before both.
ON_PATH = '''"""The tree of NeMo RL in the working folder, where there is one, else the image's."""

import os
import sys


def add() -> None:
    here = os.getcwd()
    mounted = os.path.isfile(here + "/nemo_rl/__init__.py") and os.path.isfile(here + "/uv.lock")
    sys.path.append(here if mounted else "{image}")


try:
    add()
except OSError:  # the working folder is gone
    sys.path.append("{image}")
'''


def main(
    context: Path = Path("/mnt/nemo-rl"), opt: Path = Path("/opt"), known: Path = Path("/tmp/nemo-rl.json")
) -> None:
    asked = bool(os.environ.get("NEMO_RL"))
    if not is_nemo_rl(context):
        if asked:
            raise SystemExit(f"the context nemo-rl is not NeMo RL ({LAYOUT}): give its clone, or no NEMO_RL")
        return
    if not asked:
        raise SystemExit(
            "the context nemo-rl is NeMo RL: run ./build.py fetch --nemo-rl and add --build-arg NEMO_RL=1, or leave the"
            " context out"
        )
    try:
        tree = read_tree(context, may_lack_files=True)
        check_pins_of(tree, KIT / MADE_FOR)
        write_commit(context, tree.commit, opt / "nemo-rl")
    except TreeError as error:
        raise SystemExit(str(error)) from None
    put_on_path(opt)
    link_environments(opt)
    patches = apply_patches(opt)
    known.write_text(json.dumps({**tree.as_json(), "patches": patches}))


def put_on_path(opt: Path) -> None:
    (site,) = (opt / "nemo_rl_venv/lib").glob("python3*/site-packages")
    (site / "_nemo_rl_tree.py").write_text(ON_PATH.format(image=opt / "nemo-rl"))
    (site / "nemo_rl.pth").write_text("import _nemo_rl_tree\n")


def link_environments(opt: Path) -> None:
    """Where NeMo RL finds the Python of an actor it asks uv for nothing."""
    (opt / "ray_venvs").mkdir()
    for actor in ACTORS:
        (opt / "ray_venvs" / actor).symlink_to(opt / "nemo_rl_venv")


def apply_patches(opt: Path) -> dict[str, str]:
    """Apply the tree's own patches to the Dynamo environment, and write the marker that its tests look for.

    Ours for the same fault stays: it bounds a count that is then bounded already, and runs without NeMo RL rely on it.
    """
    folder, environment = opt / "nemo-rl/docker/dynamo", opt / "dynamo_venv"
    patches = sorted(folder.glob("patches/*.patch"))
    if not patches or not environment.is_dir():
        return {}
    (site,) = (environment / "lib").glob("python3*/site-packages")
    for patch in patches:
        try:
            git_apply(site, patch)
        except subprocess.CalledProcessError as error:
            why = " ".join(error.stderr.split())[:300]
            raise SystemExit(f"{patch.name} of NeMo RL does not apply to the Dynamo environment ({why})") from None
    # What its script writes once they are applied is in quotes before the marker's name.
    said = re.findall(rf"'([^'\n]+)'[\s\\]*>[^\n]*{MARKER}", (folder / "install.sh").read_text())
    if not said:
        raise SystemExit(f"docker/dynamo/install.sh of NeMo RL has patches and writes no {MARKER}")
    (environment / MARKER).write_text("".join(f"{line}\n" for line in said))
    return {patch.name: sha256_of(patch) for patch in patches}


def git_apply(site: Path, patch: Path) -> None:
    changed = subprocess.run(
        ["git", "apply", "--numstat", str(patch)], cwd=site, check=True, capture_output=True, text=True
    ).stdout
    subprocess.run(["git", "apply", str(patch)], cwd=site, check=True, capture_output=True, text=True)
    for line in changed.splitlines():
        module = site / line.split("\t")[2]
        for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
            compiled.unlink()
        compile_share([str(module)])


if __name__ == "__main__":
    main(Path("/mnt/nemo-rl"), Path("/opt"), Path("/tmp/nemo-rl.json"))
