"""Which of several images in a layout or an archive is meant, by what they are called there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqsh.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Named(Generic[T]):
    """An image and what it may be called; the first name is told where there is a choice."""

    names: Sequence[str]
    image: T


def by_name(text: str, tag: str, images: Sequence[Named[T]]) -> list[T]:
    """Those that `tag` is a name or the end of a name of; a name without a tag means `latest`. All without `tag`."""
    ends = (f"/{tag}", f"/{tag}:latest")
    found = [entry.image for entry in images if not tag or any(f"/{name}".endswith(ends) for name in entry.names)]
    if found:
        return found
    what = f"{text}: no image of the name '{tag}' there" if tag else f"{text} holds no image"
    raise UsageError(what, f"there is {told(images)}" if images else "save or build it again")


def which(text: str, count: int, images: Sequence[Named[T]]) -> UsageError:
    return UsageError(f"{text} holds {count} images", f"name one behind a colon: {told(images)}")


def told(images: Sequence[Named[T]]) -> str:
    return ", ".join(dict.fromkeys(entry.names[0] for entry in images))
