"""Logins from the files of Docker, of podman and skopeo, and of enroot, which are only read.

An entry that cannot be used is no error, since the registry may need no login: it is reported if the registry refuses.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqsh.enroot_credentials import Entry, password_of, read_entries
from sqsh.reference import DOCKER_HUB, DOCKER_HUB_NAMES, LOOPBACK, Reference

IDENTITY = "<token>"  # the user name of a secret that is an identity token
NOT_FOUND = "credentials not found"  # what a helper says that works and knows nothing
HELPER_TIMEOUT_S = 30
DOCKER_HUB_REALM = "auth.docker.io"


@dataclass(frozen=True)
class Login:
    """A name and a password; or an identity token, which buys tokens; or a token of the registry's."""

    user: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""
    of_realm: bool = False  # kept for the realm's host, not the registry's


class Logins:
    """Logins for the registry of `reference`. `problems`: why some could not be used."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: dict[str, Login | None] = {}
        self.problems: list[str] = []

    def of_registry(self) -> Login | None:
        """The login for the registry itself, None to go without."""
        return self._once("", self._of_registry)

    def of_realm(self, realm: str) -> Login | None:
        """The login for a realm that the registry names: its own, or what enroot's file has for the realm's host."""
        return self._once(realm, lambda: self._of_realm(realm))

    def _once(self, realm: str, find: Callable[[], Login | None]) -> Login | None:
        if realm not in self._known:
            self._known[realm] = find()
            if self._known[realm] is None and self._reference.user:
                self._problem(f"there is no login of {self._reference.user} for {self._reference.host}")
        return self._known[realm]

    def _of_registry(self) -> Login | None:
        return self._from_files() or self._from_enroot(_enroot_names(self._reference.host))

    def _of_realm(self, realm: str) -> Login | None:
        if (found := self._from_files()) is not None:
            return found
        names = _enroot_names(self._reference.host)
        if realm != self._reference.host and self._may_use(realm, names):
            found = self._from_enroot(_enroot_names(realm), of_realm=True)
        return found or self._from_enroot(names)

    def _may_use(self, realm: str, registry: tuple[str, ...]) -> bool:
        """Whether a token bought with the login for `realm` may go to the registry.

        Any registry can name any realm. So the user must have said that this one is trusted, by naming a user or by an
        entry for it, as enroot wants; or both are one host's or one domain's.
        """
        host = _without_port(self._reference.host)
        other = _without_port(realm)
        if self._reference.user or any(entry.host in registry for entry in self._entries()):
            return True
        if host == other or host.endswith(f".{other}") or (LOOPBACK.fullmatch(host) and LOOPBACK.fullmatch(other)):
            return True
        if host == DOCKER_HUB and other == DOCKER_HUB_REALM:
            return True
        if any(entry.host in _enroot_names(realm) for entry in self._entries()):
            self._problem(f"to use enroot's login for {other}, name its user: docker://USER@{self._reference.host}#…")
        return False

    def _from_files(self) -> Login | None:
        for path in _auth_files():
            try:
                config = json.loads(path.read_bytes())
                if (found := self._from_config(config, path)) is not None:
                    return found
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, AttributeError, TypeError) as error:
                self._problem(f"{path} cannot be read ({type(error).__name__})")
        return None

    def _from_config(self, config: dict[str, Any], path: Path) -> Login | None:
        """A helper for this host before what the file holds itself, and that before the helper for all hosts."""
        auths: dict[str, Any] = config.get("auths") or {}
        for key, helper in (config.get("credHelpers") or {}).items():
            if _place(key) in self._hosts and (found := self._from_helper(helper, key)) is not None:
                return found
        keys = list(self._keys(auths))
        for key in keys:
            if (found := self._from_auth(auths[key] or {}, key, path)) is not None:
                return found
        if store := config.get("credsStore"):
            official = "https://index.docker.io/v1/" if self._reference.host == DOCKER_HUB else ""
            host = self._reference.host
            for key in dict.fromkeys((*keys, *filter(None, [official]), host, f"https://{host}")):
                if (found := self._from_helper(store, key)) is not None:
                    return found
        return None

    @property
    def _hosts(self) -> tuple[str, ...]:
        return DOCKER_HUB_NAMES if self._reference.host == DOCKER_HUB else (self._reference.host,)

    def _keys(self, auths: dict[str, Any]) -> Iterator[str]:
        """Keys for this repository, then for the folders it lies in, then for its host; the exact spelling first."""
        parts = self._reference.repository.split("/")
        for depth in range(len(parts), -1, -1):
            for host in self._hosts:
                place = "/".join((host, *parts[:depth]))
                if place in auths:
                    yield place
                yield from (key for key in auths if key != place and _place(key) == place)

    def _from_auth(self, entry: dict[str, str], key: str, path: Path) -> Login | None:
        user, password = entry.get("username", ""), entry.get("password", "")
        if entry.get("auth"):
            try:
                user, colon, password = base64.b64decode(entry["auth"]).decode().partition(":")
            except ValueError:
                colon = ""
            if not colon:
                self._problem(f"the login for {key} in {path} cannot be read")
                return None
        return self._wanted(
            _login(user, password.rstrip("\0"), entry.get("identitytoken", ""), entry.get("registrytoken", ""))
        )

    def _from_helper(self, helper: str, key: str) -> Login | None:
        program = f"docker-credential-{helper}"
        try:
            answer = subprocess.run(
                [program, "get"], input=key.encode(), capture_output=True, timeout=HELPER_TIMEOUT_S, check=True
            )
            found = json.loads(answer.stdout)
            return self._wanted(_login(found["Username"], found["Secret"]))
        except subprocess.CalledProcessError as error:
            said = (error.stdout + error.stderr).decode(errors="replace").strip()
            if NOT_FOUND not in said:
                self._problem(f"{program} fails for {key} ({(said.splitlines() or ['it says nothing'])[-1][:200]})")
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            self._problem(f"{program} cannot be used ({getattr(error, 'strerror', None) or type(error).__name__})")
        return None

    def _wanted(self, login: Login | None) -> Login | None:
        """An identity token has no user's name that one could ask for."""
        if login is None or not self._reference.user or login.user in (self._reference.user, IDENTITY):
            return login
        return None

    def _entries(self) -> list[Entry]:
        path = _enroot_file()
        try:
            return read_entries(path) if path is not None else []
        except OSError as error:
            self._problem(f"{path} cannot be read ({error.strerror})")
            return []

    def _from_enroot(self, names: tuple[str, ...], of_realm: bool = False) -> Login | None:
        for name in names:
            for entry in self._entries():
                if entry.host != name or (self._reference.user and entry.user != self._reference.user):
                    continue
                password, problem = password_of(entry, HELPER_TIMEOUT_S)
                if problem:
                    self._problem(problem)
                if password:
                    return Login(entry.user, password, of_realm=of_realm)
        return None

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def _login(user: str, password: str, identity: str = "", registry: str = "") -> Login | None:
    """None where nothing is said, as in the entry that `docker login` leaves when a helper keeps the login."""
    if user == IDENTITY:
        password, identity = "", identity or password
    if not (identity or registry or (user and password)):
        return None
    return Login(user, password, identity, registry)


def _auth_files() -> Iterator[Path]:
    """Files of Docker's form; those that the environment names come first."""
    variable = os.environ.get
    home = _home()
    if named := variable("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if named := variable("DOCKER_CONFIG"):
        yield Path(named) / "config.json"
    elif home is not None:
        yield home / ".docker/config.json"
    yield Path(variable("XDG_RUNTIME_DIR") or f"/run/containers/{os.getuid()}") / "containers/auth.json"
    if (config := _config_home()) is not None:
        yield config / "containers/auth.json"


def _enroot_file() -> Path | None:
    if named := os.environ.get("ENROOT_CONFIG_PATH"):
        return Path(named) / ".credentials"
    config = _config_home()
    return config / "enroot/.credentials" if config is not None else None


def _config_home() -> Path | None:
    if named := os.environ.get("XDG_CONFIG_HOME"):
        return Path(named)
    home = _home()
    return home / ".config" if home is not None else None


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # this user has none
        return None


def _place(key: str) -> str:
    """The host, and the path where it counts, of a key: an address's path says nothing but the protocol's version."""
    plain = re.sub(r"^https?://", "", key)
    host, _, path = plain.partition("/")
    path = path.strip("/")
    return f"{host.lower()}/{path}" if path and plain == key and path not in ("v1", "v2") else host.lower()


def _enroot_names(host: str) -> tuple[str, ...]:
    """What an entry of enroot's for `host` may be called: netrc knows no ports."""
    names = (host, _without_port(host))
    return (*names, *DOCKER_HUB_NAMES, DOCKER_HUB_REALM) if host == DOCKER_HUB else names


def _without_port(host: str) -> str:
    return re.sub(r":\d+$", "", host)
