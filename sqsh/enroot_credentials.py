"""enroot's `.credentials`: netrc, in which a password that begins with `$` is expanded by the shell.

The facts are those of enroot's documentation of `enroot import`. Only the entry that is used is expanded, so
another host's entry runs no command and causes no error.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
# A command takes the rest of its line, whatever words it has.
WORD = re.compile(r'(\$\([^\n]*|"\$\([^\n]*")|"((?:[^"\\\n]|\\.)*)"|\S+')
VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


@dataclass(frozen=True)
class Entry:
    host: str
    user: str
    password: str  # as it is written
    where: str  # file and line


def read_entries(path: Path) -> list[Entry]:
    """All entries that name a host, a login and a password; none where there is no file. May raise OSError."""
    try:
        text = path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    text = COMMENT.sub("", text)
    words = ((_unquoted(found), text.count("\n", 0, found.start()) + 1) for found in WORD.finditer(text))
    entries: list[Entry] = []
    fields: dict[str, str] = {}
    where = ""
    for word, line in words:
        if word == "default":  # for hosts that nobody named: no login goes to those
            fields = {}
        elif word in ("machine", "login", "password"):
            if word == "machine":
                fields, where = {}, f"line {line} of {path}"
            fields[word] = next(words, ("", line))[0]
            if len(fields) == 3:
                entries.append(Entry(fields["machine"].lower(), fields["login"], fields["password"], where))
                fields = {}
    return entries


def password_of(entry: Entry, timeout_s: float) -> tuple[str, str]:
    """The password, empty if there is none, and what was wrong with it."""
    text = entry.password
    if text.startswith("$("):
        return _answer(entry, timeout_s)
    if not text.startswith("$"):
        return text, ""
    found = os.path.expandvars(text)
    missing = VARIABLE.match(found)
    return found, f"{entry.where} names the variable {missing[0]}, which is not set" if missing else ""


def _answer(entry: Entry, timeout_s: float) -> tuple[str, str]:
    """The output of the entry's command. enroot runs it too, in the same shell."""
    command = f"printf '%s\\n' \"{entry.password}\""
    what = f"the command in {entry.where} gives no password"
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return "", f"{what} ({type(error).__name__})"
    said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:200]
    password = done.stdout.removesuffix("\n")
    return (password, "") if password else ("", f"{what} ({said})")


def _unquoted(found: re.Match[str]) -> str:
    if found[1]:
        return found[1][1:-1] if found[1].startswith('"') else found[1].strip()
    return found[0] if found[2] is None else re.sub(r"\\(.)", r"\1", found[2])
