"""Images in a registry: the OCI distribution protocol, as far as reading needs it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from sqsh.credentials import credentials
from sqsh.errors import BadImage, SqshError, UsageError
from sqsh.image import DIGEST, INDEXES, MANIFESTS, MAX_JSON, Descriptor, Image, Store, from_descriptor
from sqsh.stream import Source

TIMEOUT_S = 60.0
TRIES = 5
LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
REFERENCE = re.compile(
    r"(?P<repository>[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)"
    rf"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}))?(@(?P<digest>{DIGEST}))?"
)


@dataclass(frozen=True)
class Reference:
    host: str
    repository: str
    name: str  # a tag or a digest

    @property
    def is_digest(self) -> bool:
        return ":" in self.name


def parse_reference(text: str) -> Reference:
    """`[docker://][HOST/]REPOSITORY[:TAG][@DIGEST]`; enroot's `HOST#REPOSITORY` too."""
    plain = text.removeprefix("docker://").replace("#", "/", 1)
    host, slash, rest = plain.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", plain
    found = REFERENCE.fullmatch(rest)
    if found is None:
        raise UsageError(f"'{text}' is no image reference", "write registry/repository:tag or …@sha256:…")
    repository = found["repository"]
    if host in ("docker.io", "index.docker.io"):
        host = "registry-1.docker.io"
        repository = repository if "/" in repository else f"library/{repository}"
    return Reference(host, repository, found["digest"] or found["tag"] or "latest")


def registry_image(text: str, platform: str) -> Image:
    """Resolve a reference to its manifest; what the registry answers must hash to the digest that was asked for."""
    reference = parse_reference(text)
    registry = RegistryStore(reference)
    raw, media_type = registry.manifest(reference.name)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    if reference.is_digest and digest != reference.name:
        raise BadImage(f"the registry answers {digest} for {text}", "its content is not what was asked for")
    found = Descriptor.model_validate({"digest": digest, "size": len(raw), "mediaType": media_type})
    return from_descriptor(text, found, raw, registry, platform)


class RegistryStore(Store):
    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        local = LOOPBACK.fullmatch(reference.host)
        scheme = "http" if local else "https"
        # A proxy of the site's knows nothing of this machine's own registry.
        proxies = urllib.request.ProxyHandler({} if local else None)
        self._opener = urllib.request.build_opener(proxies)
        self._base = f"{scheme}://{reference.host}/v2/{reference.repository}"
        self._authorization = ""

    def manifest(self, name: str) -> tuple[bytes, str]:
        with self.get(f"manifests/{name}", {"Accept": ", ".join((*MANIFESTS, *INDEXES))}) as answer:
            raw = answer.read(MAX_JSON + 1)
            if len(raw) > MAX_JSON:
                raise BadImage(f"the manifest of {name} has more than {MAX_JSON} bytes")
            return raw, str(answer.headers.get("Content-Type") or "").partition(";")[0]

    def read(self, digest: str, size: int) -> bytes:
        """Manifests of an index are no blobs to a registry: what is not found as one is asked for as the other."""
        try:
            return super().read(digest, size)
        except NotThere:
            raw, _ = self.manifest(digest)
            if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
                raise BadImage(f"{digest} has other content than its digest says") from None
            return raw

    def open(self, digest: str, size: int) -> Source:
        return _Blob(self, digest, size)

    def get(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Ask, with what the registry demands to know of us once it has said so."""
        for attempt in (1, 2):
            request = urllib.request.Request(f"{self._base}/{path}", headers=headers)
            if self._authorization:
                # Not sent on to where the registry may point us: blobs often lie on another host.
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                answer: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
                return answer
            except urllib.error.HTTPError as error:
                if error.code == 401 and attempt == 1:
                    self._authorization = self._authorize(error.headers.get("WWW-Authenticate") or "")
                    continue
                raise self._refused(path, error) from None
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                reason = getattr(error, "reason", error)
                raise Unreachable(
                    f"cannot reach {self._reference.host} ({reason})", "see that the registry is up"
                ) from None
        raise AssertionError

    def _authorize(self, challenge: str) -> str:
        login = credentials(self._reference.host)
        basic = "Basic " + base64.b64encode(":".join(login).encode()).decode() if login else ""
        if not challenge.lower().startswith("bearer "):
            return basic
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        if not fields.get("realm", "").startswith(("https://", self._base.partition("/v2/")[0])):
            raise SqshError(f"{self._reference.host} asks for a token from an unsafe place")
        query = {"scope": fields.get("scope") or f"repository:{self._reference.repository}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        request = urllib.request.Request(f"{fields['realm']}?{urllib.parse.urlencode(query)}")
        if basic:
            request.add_unredirected_header("Authorization", basic)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                body = json.loads(answer.read(MAX_JSON))
            return f"Bearer {body.get('token') or body['access_token']}"
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SqshError(
                f"{self._reference.host} gives no token for {self._reference.repository} ({error})",
                "see your login (docker login, or enroot's .credentials)",
            ) from None

    def _refused(self, path: str, error: urllib.error.HTTPError) -> SqshError:
        what = f"{self._reference.host} answers {error.code} {error.reason} for {self._reference.repository}/{path}"
        if error.code == 404:
            return NotThere(what, "see that the image is there")
        if error.code >= 500 or error.code == 429:
            return Unreachable(what, "try again later")
        return SqshError(what, "see your login (docker login, or enroot's .credentials)")


class NotThere(SqshError):  # noqa: N818
    pass


class Unreachable(SqshError):  # noqa: N818
    """Worth another try."""


class _Blob:
    """A blob as it comes; a connection that breaks is taken up again where it broke."""

    def __init__(self, registry: RegistryStore, digest: str, size: int) -> None:
        self._registry = registry
        self._digest = digest
        self._size = size
        self._got = 0
        self._failures = 0
        self._answer: http.client.HTTPResponse | None = self._ask()

    def read(self, size: int, /) -> bytes:
        while True:
            try:
                if self._answer is None:
                    self._answer = self._ask()
                data = self._answer.read(size)
                if not data and self._got < self._size:
                    raise http.client.IncompleteRead(b"", self._size - self._got)
            except (Unreachable, http.client.HTTPException, OSError) as error:
                self._again(error)
                continue
            self._got += len(data)
            if data:
                self._failures = 0
            return data

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()

    def _ask(self) -> http.client.HTTPResponse:
        headers = {"Range": f"bytes={self._got}-"} if self._got else {}
        answer = self._registry.get(f"blobs/{self._digest}", headers)
        if self._got and answer.status != 206:
            left = self._got  # the whole blob again: pass over what we have
            while left:
                part = answer.read(min(left, 1 << 20))
                if not part:
                    raise http.client.IncompleteRead(b"", left)
                left -= len(part)
        return answer

    def _again(self, error: Exception) -> None:
        self.close()
        self._answer = None
        self._failures += 1
        if self._failures >= TRIES:
            raise SqshError(
                f"{self._digest} breaks off after {self._got} of {self._size} bytes ({error})", "try again"
            ) from None
        time.sleep(0.2 * 2**self._failures)
