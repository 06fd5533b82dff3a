"""Secrets stay out of whatever is printed or stored: by the name of what holds them, and by the shape of a URL."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

REDACTED = "[redacted]"
ANYWHERE = {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
AT_THE_END = {"token", "key", "pat", "pwd", "auth", "authorization", "bearer", "cookie", "netrc"}
COLUMNS = {"input_key", "output_key"}
"""Names of a data file's fields."""
URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
ASSIGNED = re.compile(r"(-{0,2}[A-Za-z_][\w-]*)=(.+)", re.DOTALL)
SHORTEST_SECRET = 4
"""Shorter values are not looked for in text: they would be found everywhere."""


def is_secret_name(name: str) -> bool:
    """Whether a key, flag or variable of this name holds a secret: `HF_TOKEN`, `--api-key`; not `max_new_tokens`."""
    if name in COLUMNS:
        return False
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part]
    return bool(parts) and (parts[-1] in AT_THE_END or not ANYWHERE.isdisjoint(parts) or parts[-2:] == ["key", "id"])


def redacted(value: Any, name: str = "") -> Any:
    """`value` with secrets replaced: strings under secret names, flags' values in word lists, credentials in URLs.

    `name`: the key `value` stands under. Numbers, booleans and nulls are kept, so `max_new_tokens: 8` stays.
    """
    if isinstance(value, Mapping):
        variables = name == "env_vars"
        return {key: _entry(str(key), inner, variables) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [
            redacted(word, _flag_before(value, index)) if isinstance(word, str) else redacted(word, name)
            for index, word in enumerate(value)
        ]
    if not isinstance(value, str) or not value:
        return value
    if is_secret_name(name):
        return REDACTED
    assigned = ASSIGNED.match(value)
    if assigned and _is_secret_variable(assigned[1]):
        return f"{assigned[1]}={REDACTED}"
    return URL_CREDENTIALS.sub(REDACTED, value)


def scrub(text: str, recipe: Any) -> str:
    """`text` without the secrets that `recipe` (plain mappings and lists) holds, and without credentials in URLs."""
    return scrubber(recipe)(text)


def scrubber(recipe: Any) -> Callable[[str], str]:
    """`scrub` for many texts: what to look for is gathered once."""
    secrets = [s for s in sorted(set(_secrets(recipe, "")), key=len, reverse=True) if len(s) >= SHORTEST_SECRET]

    def scrubbed(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, REDACTED)
        return URL_CREDENTIALS.sub(REDACTED, text)

    return scrubbed


def _entry(key: str, value: Any, is_variable: bool) -> Any:
    if is_variable and _is_secret_variable(key):
        return REDACTED if value not in (None, "") else value
    return redacted(value, key)


def _is_secret_variable(name: str) -> bool:
    """Variables are judged more strictly than keys: a secret word anywhere in the name counts (`TOKEN_FOR_HUB`)."""
    parts = set(re.split(r"[^a-z0-9]+", name.lower()))
    return is_secret_name(name) or not (ANYWHERE | AT_THE_END).isdisjoint(parts)


def _flag_before(words: Any, index: int) -> str:
    before = words[index - 1] if index else ""
    return before if isinstance(before, str) and before.startswith("--") and "=" not in before else ""


def _secrets(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name == "env_vars" and _is_secret_variable(str(key)):
                yield str(inner)
            else:
                yield from _secrets(inner, str(key))
    elif isinstance(value, list | tuple):
        for index, word in enumerate(value):
            yield from _secrets(word, _flag_before(value, index) if isinstance(word, str) else name)
    elif isinstance(value, str):
        assigned = ASSIGNED.match(value)
        if is_secret_name(name):
            yield value
        elif assigned and _is_secret_variable(assigned[1]):
            yield assigned[2]
