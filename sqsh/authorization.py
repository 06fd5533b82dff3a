"""A registry's authentication challenges, and the Authorization header that answers them.

Only the registry's own answers count as its challenges, and the realm that they name gets the registry's login. A login
that is kept for the realm's host buys a token for nothing but pulling the repository that was asked for.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from sqsh.credentials import Login, Logins
from sqsh.errors import SqshError
from sqsh.reference import HOST, LOOPBACK, Reference
from sqsh.transport import Transport

NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
PARAMETER = re.compile(rf'({NAME})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))')
SCHEME = re.compile(NAME)
TOKEN = re.compile(r"[!-~]+")
CLIENT = "sqsh"


@dataclass(frozen=True)
class Challenge:
    """`scheme` and the names of `fields` in small letters."""

    scheme: str
    fields: dict[str, str]


def parse_challenges(headers: Sequence[str]) -> list[Challenge]:
    """The challenges of all WWW-Authenticate headers; one header may hold several."""
    found: list[Challenge] = []
    for header in headers:
        at = 0
        while at < len(header):
            if found and (field := PARAMETER.match(header, at)):
                quoted = field[2]
                value = field[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                found[-1].fields.setdefault(field[1].lower(), value)
                at = field.end()
            elif scheme := SCHEME.match(header, at):
                found.append(Challenge(scheme[0].lower(), {}))
                at = scheme.end()
            else:
                at += 1
    return found


class Authorizer:
    """Answers the challenges that the registry of `reference` makes."""

    def __init__(self, reference: Reference, transport: Transport) -> None:
        self._reference = reference
        self._transport = transport
        self._logins = Logins(reference)

    @property
    def hint(self) -> str:
        """What to do where the registry still refuses."""
        return "; ".join(["see your login (docker login, or enroot's .credentials)", *self._logins.problems])

    def answer(self, headers: Sequence[str]) -> str:
        """The Authorization header for these challenges, a token before a password; empty where there is no answer."""
        failed: SqshError | None = None
        for challenge in sorted(parse_challenges(headers), key=lambda found: found.scheme != "bearer"):
            try:
                if challenge.scheme == "bearer":
                    return f"Bearer {self._token(challenge.fields)}"
                if challenge.scheme == "basic" and (login := self._logins.of_registry()) and login.password:
                    return _basic(login)
            except SqshError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return ""

    def _token(self, fields: dict[str, str]) -> str:
        realm = self._safe_realm(fields.get("realm", ""))
        login = self._logins.of_realm(realm.netloc)
        if login is not None and login.registry_token:
            return login.registry_token
        pull = f"repository:{self._reference.repository}:pull"
        scopes = [pull] if login is not None and login.of_realm else fields.get("scope", "").split() or [pull]
        service = [("service", fields["service"])] if "service" in fields else []
        if login is not None and login.identity_token:
            form = [("grant_type", "refresh_token"), ("client_id", CLIENT), ("scope", " ".join(scopes)), *service]
            body = urllib.parse.urlencode([*form, ("refresh_token", login.identity_token)]).encode()
            request = urllib.request.Request(realm.geturl(), data=body)
        else:
            query = urllib.parse.urlencode([*(("scope", scope) for scope in scopes), *service])
            url = realm._replace(query=f"{realm.query}&{query}" if realm.query else query).geturl()
            request = urllib.request.Request(url)
            if login is not None:
                request.add_unredirected_header("Authorization", _basic(login))
        return self._ask(request)

    def _ask(self, request: urllib.request.Request) -> str:
        what = f"{self._reference.host} gives no token for {self._reference.repository}"
        try:
            body = json.loads(self._transport.read(request, "a token")[0])
            token = body.get("token") or body["access_token"]
            if TOKEN.fullmatch(token):
                return str(token)
        except urllib.error.HTTPError as error:
            raise SqshError(f"{what} ({request.host} answers {error.code} {error.reason})", self.hint) from None
        except (ValueError, KeyError, AttributeError, TypeError):
            pass
        raise SqshError(f"{what} ({request.host} answers something else)", self.hint)

    def _safe_realm(self, realm: str) -> urllib.parse.SplitResult:
        """Over TLS, or on this machine if the registry is there too."""
        try:
            parts = urllib.parse.urlsplit(realm)
        except ValueError:
            parts = urllib.parse.urlsplit("")
        local = LOOPBACK.fullmatch(self._reference.host) and LOOPBACK.fullmatch(parts.netloc)
        if not HOST.fullmatch(parts.netloc) or not (parts.scheme == "https" or (parts.scheme == "http" and local)):
            raise SqshError(
                f"{self._reference.host} asks for a token from an unsafe place ({realm[:200]!r})",
                "a login goes to https:// alone; tell the registry's administrators",
            )
        return parts._replace(fragment="")


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
