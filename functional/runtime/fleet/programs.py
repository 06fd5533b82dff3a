"""Where the fleet's programs are, and the release files of an image; variables can say so for other environments."""

import os
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
