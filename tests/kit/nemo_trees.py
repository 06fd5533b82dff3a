"""Small clones of NeMo RL's layout, made from nothing."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

UV_LOCK = """version = 1
[[package]]
name = "small"
version = "1"
source = { editable = "." }
dependencies = [
  { name = "transformers", version = "5.5.4", marker = "extra != 'other'" },
  { name = "transformers", version = "5.8.1", marker = "extra == 'other'" },
  { name = "ray" },
]
[[package]]
name = "transformers"
version = "5.5.4"
source = { registry = "elsewhere" }
[[package]]
name = "transformers"
version = "5.8.1"
source = { registry = "elsewhere" }
[[package]]
name = "ray"
version = "2.56.1+local"
source = { registry = "elsewhere" }
"""
DYNAMO_LOCK = """version = 1
[[package]]
name = "small-dynamo"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "iniconfig" }]
"""
# Of a module that the Dynamo environment of a small image has.
PATCH = """--- a/iniconfig/exceptions.py
+++ b/iniconfig/exceptions.py
@@ -1 +1,2 @@
 from __future__ import annotations
+PATCHED = True
"""
INSTALL = """printf '%s\\n' \\
  'a repair, by this patch' \\
  > "${dynamo_venv_dir}/VLLM_BACKPORTS"
"""
FILES = {
    "nemo_rl/__init__.py": "WHERE = __file__\n",
    "pyproject.toml": '[project]\nname = "small"\nversion = "1"\n',
    "uv.lock": UV_LOCK,
    "docker/dynamo/uv.lock": DYNAMO_LOCK,
    "docker/dynamo/install.sh": INSTALL,
    "docker/dynamo/patches/small.patch": PATCH,
    ".gitignore": "ignored/\n",
    ".dockerignore": "*.log\n",
    "kept.log": "in the commit, and not in a build's context\n",
}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=small")
    return git(folder, "rev-parse", "HEAD").strip()


def write_tree(folder: Path, files: Mapping[str, str] = FILES) -> str:
    """The commit of a new clone that has these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "--quiet")
    return commit(folder)


def write_made_for(path: Path, commit: str, files: Mapping[str, str] = FILES) -> None:
    """What `./build.py lock nemo-rl` writes of such a tree."""
    digests = {name: hashlib.sha256(files[name].encode()).hexdigest() for name in ("uv.lock", "docker/dynamo/uv.lock")}
    lines = [f'"{name}" = "{digest}"' for name, digest in digests.items()]
    path.write_text("\n".join([f'commit = "{commit}"', "[sha256]", *lines, "[pins]"]) + "\n")
