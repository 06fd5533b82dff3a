"""Command-line words of Dynamo's programs: values to flags, and the words a recipe adds by itself."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["bool", "switch", "value", "list"]
"""bool: `--x` and `--no-x`; switch: `--x` alone; value: one word follows; list: any number of words follows."""


def by_name(bool: str = "", switch: str = "", value: str = "", list: str = "") -> dict[str, Kind]:
    """Flags with their kinds, from the names of each kind with spaces between."""
    named: dict[Kind, str] = {"bool": bool, "switch": switch, "value": value, "list": list}
    return {name: kind for kind, names in named.items() for name in names.split()}


def as_flags(name: str, value: Any, kind: Kind) -> tuple[str, ...]:
    """Words for one option; none for None. Raises ValueError when the value does not suit the kind.

    `("x_y", True, "bool")` → `--x-y`; False gives `--no-x-y`; mappings go as JSON.
    """
    flag = "--" + name.replace("_", "-")
    if value is None:
        return ()
    if kind in ("bool", "switch"):
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        if kind == "switch":
            return (flag,) if value else ()
        return (flag,) if value else ("--no-" + flag[2:],)
    if kind == "list":
        words = [_word(item) for item in (value if isinstance(value, list | tuple) else [value])]
        return (flag, *words) if words else ()
    word = _word(value)
    return (f"{flag}={word}",) if word.startswith("-") else (flag, word)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def find_extra_problem(
    words: Sequence[str], flags: Mapping[str, Kind], refusal: Callable[[str], str | None]
) -> tuple[str, str] | None:
    """The first of a recipe's own words that may not be given, and why; None when all may.

    `refusal`: why the flag of this name may not be given (set elsewhere, managed, unknown), None when it may. A flag is
    recognised in every spelling its parser takes: `--x=1`, `--x 1`, `--no-x`, underscores, `--x.key 1`, `--x+ 1` and
    abbreviations. One-dash spellings are refused.
    """
    seen: set[str] = set()
    room = 0  # words that the flag before still takes
    for word in words:
        if not word.startswith("-") or _is_number(word):
            if room <= 0:
                return word, "belongs to no flag: a worker takes no positional words"
            room -= 1
            continue
        if not word.startswith("--") or word == "--":
            return word, "write the flag's long name, with two dashes"
        spelled, equals, _ = word[2:].partition("=")
        named = _names(spelled, flags)
        for name in named:
            if reason := refusal(name):
                return word, reason
        if len(named) > 1:
            return word, f"is short for several flags: {', '.join(named)}"
        if named[0] in seen and "." not in spelled and not spelled.endswith("+"):
            return word, "is given twice"
        seen.add(named[0])
        takes = {"bool": 0, "switch": 0, "value": 1, "list": len(words)}[flags.get(named[0], "value")]
        room = 0 if equals else takes
    return None


def _names(spelled: str, flags: Mapping[str, Kind]) -> list[str]:
    """Names the parser may take `spelled` (no dashes before it) for: one when exact, several when abbreviated."""
    name = spelled.split(".")[0].rstrip("+").replace("-", "_")
    for candidate in (name, name.removeprefix("no_")):
        if candidate in flags:
            return [candidate]
    short = [known for known in flags if name and (known.startswith(name) or f"no_{known}".startswith(name))]
    return short or [name.removeprefix("no_")]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
