"""What a text names in a registry: host, repository, tag or digest, and who asks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqsh.errors import UsageError

DIGEST = r"sha256:[0-9a-f]{64}"
DOCKER_HUB = "registry-1.docker.io"
DOCKER_HUB_NAMES = ("index.docker.io", "docker.io", DOCKER_HUB)
HOST = re.compile(r"([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\])(:\d+)?")
LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
REPOSITORY = re.compile(
    r"(?P<repository>[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
)
USER = re.compile(r"[^/#\s]+")


@dataclass(frozen=True)
class Reference:
    host: str
    repository: str
    name: str  # a tag or a digest
    user: str = ""  # whose login is to be used; empty: whatever login there is

    @property
    def is_digest(self) -> bool:
        return ":" in self.name


def parse_reference(text: str) -> Reference:
    """`[docker://][USER@][HOST/]REPOSITORY[:TAG][@DIGEST]`; enroot's `HOST#REPOSITORY` too."""
    rest, digest = text.removeprefix("docker://"), ""
    before, at, behind = rest.rpartition("@")
    if at and re.fullmatch(DIGEST, behind):
        rest, digest = before, behind
    user, at, place = rest.rpartition("@")
    host, separator, path = place.partition("#")
    if not separator:
        host, _, path = place.partition("/")
        if not path or not ("." in host or ":" in host or host == "localhost"):
            host, path = "docker.io", place
    found = REPOSITORY.fullmatch(path)
    if found is None or not HOST.fullmatch(host) or (at and not USER.fullmatch(user)) or place.startswith("sha256:"):
        raise UsageError(f"'{text}' is no image reference", "write registry/repository:tag or …@sha256:…")
    host, repository = host.lower(), found["repository"]
    if host in DOCKER_HUB_NAMES:
        host = DOCKER_HUB
        repository = repository if "/" in repository else f"library/{repository}"
    return Reference(host, repository, digest or found["tag"] or "latest", user)
