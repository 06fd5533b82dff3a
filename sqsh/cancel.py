"""Work that a signal can end safely at any moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from sqsh.errors import SqshError

T = TypeVar("T")
NO_THREAD = "can't start new thread"  # RuntimeError's words (CPython 3.11 to 3.14)


class Cancelled(Exception):  # noqa: N818
    """The work was asked to end."""


class Cancel:
    """A request to end; the work checks it wherever it may wait or run for long."""

    def __init__(self) -> None:
        self._asked = False

    def ask(self) -> None:
        self._asked = True

    def check(self) -> None:
        if self._asked:
            raise Cancelled


def in_thread(work: Callable[[Cancel], T]) -> T:
    """Run `work` in a thread of its own while this thread only waits; whatever it raises is raised here.

    What a signal's handler raises can hit the main thread while it takes a lock, which then stays taken for ever. Here
    it hits nothing but a read. The work is told to end, and has ended when the handler's exception goes on.
    Raises SqshError when this process may start no more threads, here or in the work.
    """
    cancel = Cancel()
    results: list[T] = []
    errors: list[BaseException] = []
    ended, at_end = os.pipe()

    def run() -> None:
        try:
            results.append(work(cancel))
        except BaseException as error:
            errors.append(error)
        finally:
            os.close(at_end)

    thread = threading.Thread(target=run, name="work")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread inherits it
    try:
        try:
            thread.start()
        except RuntimeError as error:
            errors.append(error)
            os.close(at_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.read(ended, 1)
    except BaseException:
        cancel.ask()
        while not (results or errors):
            _wait(ended)
        raise
    finally:
        os.close(ended)
    if errors:
        if NO_THREAD in str(errors[0]):
            hint = "raise the limit: ulimit -u, or pids.max of the cgroup"
            raise SqshError("no more threads can be started", hint) from errors[0]
        raise errors[0]
    return results[0]


def _wait(ended: int) -> None:
    try:
        os.read(ended, 1)
    except BaseException:
        return  # a second signal: the first one's work is still going on
