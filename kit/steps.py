"""Progress on stderr: one line per step, with its time and size, on a terminal and in a CI log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_quiet = False
_open: list[Step] = []
_live: Progress | None = None


def set_quiet(quiet: bool) -> None:
    global _quiet
    _quiet = quiet


@dataclass
class Step:
    """A step's title and the notes for its closing line."""

    title: str
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def moved(self, size: int) -> None:
        """Note how many bytes the step has moved so far, if any, and how fast."""
        if size == 0:
            return
        rate = int(size / max(time.monotonic() - self.started, 0.001))
        self.note(f"{size_text(size)}, {size_text(rate)}/s")


@contextmanager
def complete_step(title: str) -> Iterator[Step]:
    """Announce `title`, run the body, and close the line with the elapsed time and whatever the body noted.

    Everything goes to stderr, so that a command's stdout holds its result only. An exception closes the line as failed
    and propagates.
    """
    console = _console()
    step = Step(title)
    indent = "  " * len(_open)
    _open.append(step)
    try:
        with _spinner(console):
            if not _quiet and not console.is_terminal:
                console.print(f"{indent}… {title}", highlight=False, markup=False)
            yield step
    except BaseException:
        _close(indent, "[red]✗[/]", step)
        raise
    else:
        _close(indent, "[green]✓[/]", step)
    finally:
        _open.remove(step)


def say(text: str) -> None:
    """Print one line that is not a step."""
    if not _quiet:
        _console().print("  " * len(_open) + text, highlight=False, markup=False)


def size_text(size: int) -> str:
    """Bytes in decimal units: 999 B, 1.2 kB, 3.45 GB."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value:.0f} TB"


def seconds_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def _close(indent: str, mark: str, step: Step) -> None:
    if _quiet:
        return
    notes = [seconds_text(time.monotonic() - step.started), *step.notes]
    _console().print(f"{indent}{mark} {escape(step.title)}  ({escape(', '.join(notes))})", highlight=False)


def _console() -> Console:
    if _live is not None:
        return _live.console  # it keeps its last line below what is printed
    # A new one each time: tests and callers may have replaced stderr, and a CI log has no width.
    plain = bool(os.environ.get("CI"))
    return Console(stderr=True, soft_wrap=True, force_terminal=False if plain else None)


@contextmanager
def _spinner(console: Console) -> Iterator[None]:
    """On a terminal, show a last line with the titles of the open steps and the time since the outermost started."""
    global _live
    titles = " › ".join(step.title for step in _open)
    if _quiet or not console.is_terminal:
        yield
    elif _live is not None:
        before = _live.tasks[0].description
        _live.update(_live.tasks[0].id, description=titles)
        try:
            yield
        finally:
            _live.update(_live.tasks[0].id, description=before)
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as _live:
            _live.add_task(titles, total=None)
            try:
                yield
            finally:
                _live = None
