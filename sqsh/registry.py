"""Images in a registry: the OCI distribution protocol, as far as reading needs it."""

from __future__ import annotations

import hashlib
import http.client
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message

from sqsh.authorization import Authorizer
from sqsh.errors import BadImage, SqshError
from sqsh.manifest import INDEXES, MANIFESTS, Descriptor, Image, Source, Store, from_descriptor, refuse_schema_1
from sqsh.reference import LOOPBACK, Reference, parse_reference
from sqsh.transport import Patience, Transport, Unreachable, origin


def registry_image(text: str, platform: str, note: Callable[[str], None]) -> Image:
    """Resolve a reference to its manifest; what the registry answers must hash to the digest that was asked for."""
    reference = parse_reference(text)
    registry = RegistryStore(reference, note)
    raw, media_type = registry.manifest(reference.name)
    refuse_schema_1(text, raw, media_type)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    if reference.is_digest and digest != reference.name:
        raise BadImage(f"the registry answers {digest} for {text}", "its content is not what was asked for")
    found = Descriptor.model_validate({"digest": digest, "size": len(raw), "mediaType": media_type})
    return from_descriptor(text, found, raw, registry, platform)


class RegistryStore(Store):
    def __init__(self, reference: Reference, note: Callable[[str], None]) -> None:
        self._reference = reference
        self._transport = Transport(reference.host, note)
        self._authorizer = Authorizer(reference, self._transport)
        scheme = "http" if LOOPBACK.fullmatch(reference.host) else "https"
        self._base = f"{scheme}://{reference.host}/v2/{reference.repository}"
        self._authorization = ""

    def manifest(self, name: str) -> tuple[bytes, str]:
        def once() -> tuple[bytes, Message]:
            with self.get(f"manifests/{name}", {"Accept": ", ".join((*MANIFESTS, *INDEXES))}) as answer:
                return self._transport.whole(answer, self._reference.host), answer.headers

        raw, headers = self._transport.patiently(once)
        return raw, str(headers.get("Content-Type") or "").partition(";")[0].strip().lower()

    def read_manifest(self, digest: str, size: int) -> bytes:
        """Manifests of an index are no blobs to a registry."""
        raw, _ = self.manifest(digest)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise BadImage(f"{digest} has other content than its digest says", "its content is not what was asked for")
        return raw

    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source:
        return _Blob(self, digest, size, Patience(self._transport.note, stopped))

    def get(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send one request, with an Authorization header if the registry has asked for one."""
        for attempt in (1, 2):
            request = urllib.request.Request(f"{self._base}/{path}", headers=headers)
            if self._authorization:
                # Not sent on to where the registry may point us: blobs often lie on another host.
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                return self._transport.open(request, f"{self._reference.repository}/{path}")
            except urllib.error.HTTPError as error:
                own = origin(error.url) == origin(self._base)
                if error.code == 401 and attempt == 1 and own:
                    answer = self._authorizer.answer(error.headers.get_all("WWW-Authenticate") or [])
                    if answer:
                        self._authorization = answer
                        continue
                raise self._refused(path, error, own) from None
        raise AssertionError

    def _refused(self, path: str, error: urllib.error.HTTPError, own: bool) -> SqshError:
        host = self._reference.host
        who = host if own else f"{origin(error.url)[1] or 'the place'}, where {host} points,"
        what = f"{who} answers {error.code} {error.reason} for {self._reference.repository}/{path}"
        if error.code == 404:
            return SqshError(what, "see that the image is there")
        if error.code not in (401, 403):
            return SqshError(what, "see what the registry's log says")
        if not own:
            return SqshError(what, f"no login goes there; tell the administrators of {host}")
        return SqshError(what, self._authorizer.hint)


class _Blob:
    """A blob as it comes; a connection that breaks is taken up again where it broke."""

    def __init__(self, registry: RegistryStore, digest: str, size: int, patience: Patience) -> None:
        self._registry = registry
        self._digest = digest
        self._size = size
        self._patience = patience
        self._got = 0
        self._answer: http.client.HTTPResponse | None = None

    def read(self, size: int, /) -> bytes:
        while True:
            try:
                if self._answer is None:
                    self._answer = self._ask()
                data = self._answer.read(size)
                if not data and self._got < self._size:
                    raise http.client.IncompleteRead(b"", self._size - self._got)
            except (Unreachable, http.client.HTTPException, OSError) as error:
                data = error.partial if isinstance(error, http.client.IncompleteRead) else b""
                if self._answer is None or (not data and self._got < self._size):
                    self._again(error)
                    continue
            self._got += len(data)
            if data:
                self._patience.worked()
            return data

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()

    def _ask(self) -> http.client.HTTPResponse:
        headers = {"Range": f"bytes={self._got}-"} if self._got else {}
        answer = self._registry.get(f"blobs/{self._digest}", headers)
        left = self._got - self._start(answer)
        if left < 0:
            raise http.client.IncompleteRead(b"", -left)
        while left:  # it begins earlier than it was asked to: pass over what we have
            part = answer.read(min(left, 1 << 20))
            if not part:
                raise http.client.IncompleteRead(b"", left)
            left -= len(part)
        return answer

    def _start(self, answer: http.client.HTTPResponse) -> int:
        """Where in the blob an answer begins: 206 alone may begin elsewhere than at the start, and says where."""
        if answer.status != 206:
            return 0
        stated = re.match(r"bytes (\d+)-", str(answer.headers.get("Content-Range") or ""))
        return int(stated[1]) if stated else self._got

    def _again(self, error: Exception) -> None:
        self.close()
        self._answer = None
        if self._patience.waits(error):
            return
        if self._got == 0 and isinstance(error, Unreachable):
            raise error
        raise SqshError(
            f"{self._digest} breaks off after {self._got} of {self._size} bytes ({error})", "try again"
        ) from None
