"""Say what is going on: one line a step, with its time and size, on a terminal and in a CI log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_quiet = False
_depth = 0


def set_quiet(quiet: bool) -> None:
    global _quiet
    _quiet = quiet


@dataclass
class Step:
    """What a step adds to its own closing line."""

    title: str
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


@contextmanager
def complete_step(title: str) -> Iterator[Step]:
    """Announce `title`, run the body, and close the line with the elapsed time and whatever the body noted.

    Everything goes to stderr, so that a command's stdout stays its answer. An exception closes the line as failed
    and goes on.
    """
    global _depth
    console = _console()
    step = Step(title)
    indent = "  " * _depth
    started = time.monotonic()
    _depth += 1
    try:
        # Nested steps print their own lines, so only a leaf may hold the terminal's last line.
        with _spinner(console, indent + title) if not _quiet and _depth == 1 else _still():
            if not _quiet and not console.is_terminal:
                console.print(f"{indent}… {title}", highlight=False, markup=False)
            yield step
    except BaseException:
        _say(console, indent, "[red]✗[/]", step, started)
        raise
    finally:
        _depth -= 1
    _say(console, indent, "[green]✓[/]", step, started)


def say(text: str) -> None:
    """One line that is not a step."""
    if not _quiet:
        _console().print("  " * _depth + text, highlight=False, markup=False)


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


def _say(console: Console, indent: str, mark: str, step: Step, started: float) -> None:
    if _quiet:
        return
    notes = [seconds_text(time.monotonic() - started), *step.notes]
    console.print(f"{indent}{mark} ", end="")
    console.print(f"{step.title}  ({', '.join(notes)})", highlight=False, markup=False)


def _console() -> Console:
    # Made anew each time: tests and callers may have swapped stderr, and a CI log has no width of its own.
    plain = bool(os.environ.get("CI"))
    return Console(stderr=True, soft_wrap=True, force_terminal=False if plain else None)


@contextmanager
def _spinner(console: Console, title: str) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(title, total=None)
        yield


@contextmanager
def _still() -> Iterator[None]:
    yield
