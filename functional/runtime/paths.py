"""Where the programs of an image live; every path has an environment override, so plain environments work too.

And questions about paths that a recipe names, which may be of any length and hold any character.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.errors import ConfigError


@dataclass(frozen=True)
class Programs:
    """Executables a fleet is made of."""

    dynamo_python: Path
    etcd: Path
    nats_server: Path


def find_programs() -> Programs:
    """Return the fleet's executables.

    `DYNAMO_VENV` (default /opt/dynamo_venv) holds Dynamo, vLLM, nats-server and etcd; `DYNAMO_PYTHON`, `ETCD_BIN` and
    `NATS_SERVER_BIN` name single ones. Raises ConfigError naming the first that is missing.
    """
    bin_dir = Path(os.environ.get("DYNAMO_VENV", "/opt/dynamo_venv")) / "bin"
    found = Programs(
        dynamo_python=Path(os.environ.get("DYNAMO_PYTHON", str(bin_dir / "python"))),
        etcd=Path(os.environ.get("ETCD_BIN", str(bin_dir / "etcd"))),
        nats_server=Path(os.environ.get("NATS_SERVER_BIN", str(bin_dir / "nats-server"))),
    )
    for variable, path in (
        ("DYNAMO_PYTHON", found.dynamo_python),
        ("ETCD_BIN", found.etcd),
        ("NATS_SERVER_BIN", found.nats_server),
    ):
        if not os.access(path, os.X_OK):
            raise ConfigError(
                f"{path} is missing: this environment has no Dynamo runtime "
                f"(build the image with BUILD_DYNAMO=1, or set DYNAMO_VENV or {variable})"
            )
    return found


def release_dir() -> Path:
    """Folder with build.json and image.json, where the environment is an image of ours."""
    return Path(os.environ.get("RELEASE_DIR", "/opt/release"))


def functional_home() -> Path:
    """Project folder that holds the recipes."""
    default = "/opt/functional" if Path("/opt/functional/recipes").is_dir() else str(Path(__file__).parents[1])
    return Path(os.environ.get("FUNCTIONAL_HOME", default))


def is_folder(name: str) -> bool:
    """As Path.is_dir; False for what is no path at all (too long, NUL in it)."""
    with suppress(OSError, ValueError):
        return Path(name).is_dir()
    return False


def find_file_problem(name: str) -> str | None:
    """Why `name` is no file that can be read; None when it is one."""
    path = Path(name)
    with suppress(OSError, ValueError):
        if path.is_file():
            return None if os.access(path, os.R_OK) else "may not be read"
        if path.exists():
            return "is a folder" if path.is_dir() else "is no plain file"
    return "no such file" if path.is_absolute() else f"no such file (looked in {Path.cwd()})"
