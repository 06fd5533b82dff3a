"""Copies blocks of earlier outputs in a process of its own.

Where most of an output is a copy, copying takes about as long as building the tables does. As a thread it would share
the interpreter with that, and wait for it at every call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import NoReturn

from isal import isal_zlib

# The source by its place among the files sent so far, of which the target is the first; offset in it, position in the
# target, size, check sum.
REQUEST = struct.Struct("<IQQQI")
ANSWER = struct.Struct("<i")  # DONE, CHANGED, or the error number of a write
DONE, CHANGED = 0, -1
MOST_ASKED = 8  # requests without an answer
PART = 1 << 20  # copied at once: the kernel takes several times as long for larger writes
# The process looks for modules where this one does, in whatever way that came to be.
START = "import sys; sys.path[:] = sys.argv[1:]; from sqsh.copier import serve; serve()"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Changed(Exception):  # noqa: N818
    """An earlier output no longer matches the index, or cannot be copied."""


class Copier:
    """Copies to the file `target`, in which others may write elsewhere meanwhile. For one thread at a time."""

    def __init__(self, target: int) -> None:
        """Raises Changed when the process cannot be started."""
        if not sys.executable:
            raise Changed
        command = [sys.executable, "-c", START, *map(str, sys.path)]
        try:
            self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            raise Changed from None
        try:
            self._process = subprocess.Popen(
                command, stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._socket.close()
            raise Changed from None
        finally:
            its.close()
        self._files = [target]
        self._sent = 0
        self._asked = 0

    def copy(self, source: int, start: int, position: int, size: int, total: int) -> None:
        """Ask for `size` bytes from offset `start` of the file `source`, whose check sum is `total`, to go to
        `position`. What goes wrong is raised by a later call."""
        if source not in self._files:
            self._files.append(source)
        request = REQUEST.pack(self._files.index(source), start, position, size, total)
        try:
            socket.send_fds(self._socket, [request], self._files[self._sent :])
        except (BrokenPipeError, ConnectionResetError):
            raise Changed from None
        self._sent = len(self._files)
        self._asked += 1
        if self._asked >= MOST_ASKED:
            self._take_answer()

    def finish(self) -> None:
        """Wait for all that was asked. Raises OSError where it could not be written, Changed."""
        while self._asked:
            self._take_answer()

    def kill(self) -> None:
        """End the process, whatever it is at; whoever waits for its answer gets Changed. For any thread."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and give back what it took."""
        self.kill()
        self._process.wait()
        self._socket.close()

    def _take_answer(self) -> None:
        self._asked -= 1
        try:
            answer = self._socket.recv(ANSWER.size)
        except ConnectionResetError:
            answer = b""
        if not answer:  # it has ended, or never began
            raise Changed
        (status,) = ANSWER.unpack(answer)
        if status == CHANGED:
            raise Changed
        if status != DONE:
            raise OSError(status, os.strerror(status))


def read_earlier(source: int, part: memoryview | bytearray, start: int) -> None:
    """Fill `part` from an earlier output. Raises Changed if that cannot be read, or ends before."""
    try:
        count = os.preadv(source, [part], start)
    except OSError:
        raise Changed from None
    if count < len(part):
        raise Changed


def serve() -> NoReturn:
    """In the process: copy what is asked for on stdin, a socket, until the socket is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # even while stopped: it shares the output's lock
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=0) as asked:
        buffer = memoryview(bytearray(PART))
        files: list[int] = []
        while True:
            request, handles, _, _ = socket.recv_fds(asked, REQUEST.size, 2)
            if not request:
                break
            files += handles
            source, *words = REQUEST.unpack(request)
            asked.send(ANSWER.pack(_status(files[source], files[0], buffer, *words)))
    os._exit(0)


def _status(source: int, target: int, buffer: memoryview, *words: int) -> int:
    try:
        _copy(source, target, buffer, *words)
    except Changed:
        return CHANGED
    except OSError as error:
        return error.errno or errno.EIO
    return DONE


def _copy(source: int, target: int, buffer: memoryview, start: int, position: int, size: int, total: int) -> None:
    found = 0
    for at in range(0, size, len(buffer)):
        part = buffer[: size - at]
        read_earlier(source, part, start + at)
        found = isal_zlib.crc32(part, found)
        written = 0
        while written < len(part):
            written += os.pwrite(target, part[written:], position + at + written)
    if found != total:
        raise Changed
