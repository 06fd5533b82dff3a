"""Who we are to a registry: Docker's and enroot's files, read and never written."""

from __future__ import annotations

import base64
import json
import netrc
import os
import subprocess
from pathlib import Path
from typing import Any

from sqsh.errors import SqshError

DOCKER_HUB = "registry-1.docker.io"
DOCKER_HUB_KEYS = ("https://index.docker.io/v1/", "docker.io", "index.docker.io")
HELPER_TIMEOUT_S = 30


def credentials(host: str) -> tuple[str, str] | None:
    """Name and password for `host`, or None to go without."""
    names = (host, f"https://{host}", *(DOCKER_HUB_KEYS if host == DOCKER_HUB else ()))
    return _from_docker(names) or _from_enroot(names)


def _from_docker(names: tuple[str, ...]) -> tuple[str, str] | None:
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if not path.exists():
        return None
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        for name in names:
            helper = config.get("credHelpers", {}).get(name)
            if helper and (login := _from_helper(helper, name)):
                return login
            entry = config.get("auths", {}).get(name) or {}
            if "auth" in entry:
                user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
                return user, password.rstrip("\0")
            if "username" in entry and "password" in entry:
                return entry["username"], entry["password"]
        if store := config.get("credsStore"):
            for name in names:
                if login := _from_helper(store, name):
                    return login
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise SqshError(
            f"{path} cannot be read ({type(error).__name__})", "see that it is what docker login wrote"
        ) from None
    return None


def _from_helper(helper: str, name: str) -> tuple[str, str] | None:
    try:
        answer = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=name.encode(),
            capture_output=True,
            timeout=HELPER_TIMEOUT_S,
            check=True,
        )
        found = json.loads(answer.stdout)
        return found["Username"], found["Secret"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None


def _from_enroot(names: tuple[str, ...]) -> tuple[str, str] | None:
    folder = os.environ.get("ENROOT_CONFIG_PATH") or Path.home() / ".config" / "enroot"
    path = Path(folder) / ".credentials"
    if not path.exists():
        return None
    try:
        entries = netrc.netrc(path)
    except (netrc.NetrcParseError, OSError) as error:
        raise SqshError(
            f"{path} cannot be read ({type(error).__name__})", "write machine HOST login NAME password …"
        ) from None
    for name in (*names, *(("auth.docker.io",) if DOCKER_HUB in names else ())):
        found = entries.authenticators(name) if name in entries.hosts else None
        if found:
            return os.path.expandvars(found[0]), os.path.expandvars(found[2] or "")
    return None
