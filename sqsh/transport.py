"""Requests to a registry and to where it points: asked again when it is busy or the connection breaks.

A login stays with the host, the port and the scheme that it was sent to: no redirect takes it elsewhere.
"""

from __future__ import annotations

import email.utils
import http.client
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.message import Message
from typing import IO, TypeVar

from sqsh.errors import SqshError
from sqsh.reference import LOOPBACK

TIMEOUT_S = 60.0
TRIES = 5  # in a row without success
LONGEST_WAIT_S = 60.0  # a registry that asks for more is asked no more
BUSY = (408, 429, 500, 502, 503, 504)
MAX_JSON = 16 << 20
T = TypeVar("T")
PORTS = {"http": 80, "https": 443}


class Unreachable(SqshError):  # noqa: N818
    """Worth another try, `after_s` seconds from now if the registry says when."""

    def __init__(self, what: str, hint: str, after_s: float | None = None) -> None:
        super().__init__(what, hint)
        self.after_s = after_s


class Patience:
    """Counts failures in a row and waits between them."""

    def __init__(self, note: Callable[[str], None], stopped: threading.Event | None = None) -> None:
        self._note = note
        self._stopped = stopped or threading.Event()
        self._failures = 0

    def worked(self) -> None:
        self._failures = 0

    def waits(self, error: Exception) -> bool:
        """Wait as long as `error` asks for, or longer each time. False: there is no use in another try."""
        self._failures += 1
        asked = error.after_s if isinstance(error, Unreachable) else None
        seconds = 0.2 * 2**self._failures if asked is None else asked
        if self._failures >= TRIES or seconds > LONGEST_WAIT_S:
            return False
        if asked:
            self._note(f"note: {error.what if isinstance(error, SqshError) else error}: again in {seconds:.0f} s")
        return not wait(self._stopped, seconds)


def wait(stopped: threading.Event, seconds: float) -> bool:
    """Whether it was stopped meanwhile."""
    return stopped.wait(seconds)


class Transport:
    """Sends requests for the registry `host`."""

    def __init__(self, host: str, note: Callable[[str], None]) -> None:
        self.note = note
        self._answered = False
        # A proxy of the site's knows nothing of this machine's own registry.
        proxies = urllib.request.ProxyHandler({} if LOOPBACK.fullmatch(host) else None)
        self._opener = urllib.request.build_opener(proxies, _Redirects)

    def open(self, request: urllib.request.Request, what: str) -> http.client.HTTPResponse:
        """The answer to one try. Raises HTTPError where asking again would change nothing, else Unreachable."""
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            self._answered = True
            if error.code not in BUSY:
                raise
            error.close()
            after_s = _retry_after(error.headers)
            when = f"in {after_s:.0f} s, as it asks for" if after_s else "later"
            raise Unreachable(
                f"{request.host} answers {error.code} {error.reason} for {what}", f"try again {when}", after_s
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no URL that can be read
            raise self._no_answer(request.host, error) from None
        self._answered = True
        return answer

    def read(self, request: urllib.request.Request, what: str) -> tuple[bytes, Message]:
        """A whole small answer and its headers, however often it takes to get them."""
        return self.patiently(lambda: self._read(request, what))

    def patiently(self, work: Callable[[], T]) -> T:
        """What `work` returns, done again while it raises Unreachable."""
        patience = Patience(self.note)
        while True:
            try:
                return work()
            except Unreachable as error:
                if not patience.waits(error):
                    raise

    def whole(self, answer: http.client.HTTPResponse, host: str) -> bytes:
        """All that a small answer of `host` holds."""
        try:
            raw = answer.read(MAX_JSON + 1)
            if answer.length and len(raw) <= MAX_JSON:
                raise http.client.IncompleteRead(raw, answer.length)
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(host, error) from None
        if len(raw) > MAX_JSON:
            raise SqshError(f"{host} answers more than {MAX_JSON} bytes where few are due")
        return raw

    def _read(self, request: urllib.request.Request, what: str) -> tuple[bytes, Message]:
        with self.open(request, what) as answer:
            return self.whole(answer, request.host), answer.headers

    def _no_answer(self, host: str, error: Exception) -> SqshError:
        """A registry that has never answered and takes no connection is more likely a wrong name than a busy one."""
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        what, hint = f"cannot reach {host} ({reason})", "see that the registry is up"
        never = isinstance(error, urllib.error.URLError) and isinstance(
            reason, ConnectionRefusedError | TimeoutError | socket.gaierror
        )
        if isinstance(reason, ssl.SSLCertVerificationError | ValueError) or (never and not self._answered):
            return SqshError(what, hint)
        return Unreachable(what, hint)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in PORTS:
            return None
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        login = req.unredirected_hdrs.get("Authorization")
        if following is not None and login and origin(newurl) == origin(req.full_url):
            following.add_unredirected_header("Authorization", login)
        return following


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what a login is for. A URL that cannot be read has an origin of its own."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return url, "", None


def _retry_after(headers: Message) -> float | None:
    """Seconds, from a number or a date; a date counts from the registry's own clock where it states that."""
    text = str(headers.get("Retry-After") or "").strip()
    if text.isdigit():
        return float(text[:9])
    try:
        then = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    try:
        now = email.utils.parsedate_to_datetime(str(headers.get("Date")))
    except ValueError:
        now = datetime.fromtimestamp(time.time(), UTC)
    if then.tzinfo is None or now.tzinfo is None:
        then, now = then.replace(tzinfo=UTC), now.replace(tzinfo=UTC)
    return max((then - now).total_seconds(), 0.0)
