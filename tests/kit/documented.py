"""The commands that the documentation shows: in code blocks, and whole ones within the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("**/*.md")), REPO / "sqsh/README.md"]
OTHER_LANGUAGES = ("mermaid", "python")
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:\./build\.py|functional|make|ci/[a-z/_-]+\.(?:sh|py)|uv|docker|eval|export|sbatch|sqsh|bash|python)(?: |$)"
)


@dataclass(frozen=True)
class Line:
    """A line of a code block, continuation lines joined to it and its comment taken away; `said`: the lines after it
    that are no commands."""

    page: str
    text: str
    said: tuple[str, ...] = ()

    @property
    def is_command(self) -> bool:
        return PROGRAM.match(self.text) is not None


def commands_in_blocks(page: Path) -> list[Line]:
    """Every line of every block counts: one that is no command must belong to the one before."""
    found: list[Line] = []
    for text in _joined(_block_lines(page.read_text())):
        line = Line(page.relative_to(REPO).as_posix(), text)
        if line.is_command or not found:
            found.append(line)
        else:
            found[-1] = Line(line.page, found[-1].text, (*found[-1].said, text))
    return found


def commands_in_text(page: Path) -> set[str]:
    """Code within sentences that begins with a program and goes on; what stands for something (…, NAME) is left out."""
    code = {match for match in re.findall(r"`([^`\n]+)`", page.read_text()) if PROGRAM.match(match)}
    return {text for text in code if " " in text and not re.search(r"…| [A-Z]+\b(?!=)", text)}


def _block_lines(text: str) -> list[str]:
    lines: list[str] = []
    language = None
    for line in text.splitlines():
        goes_on = bool(lines) and lines[-1].endswith("\\")
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language is not None:
            lines += [] if language in OTHER_LANGUAGES else [line]
        elif re.match(r" {4}\S", line) or (goes_on and line.startswith("    ")):
            lines.append(line[4:])
    return lines


def _joined(lines: list[str]) -> list[str]:
    joined: list[str] = []
    for line in lines:
        words = re.sub(r"(^|\s)# .*$", "", line).strip()
        if joined and joined[-1].endswith("\\"):
            joined[-1] = f"{joined[-1][:-1].rstrip()} {words}"
        else:
            joined.append(words)
    return [line for line in joined if line]
