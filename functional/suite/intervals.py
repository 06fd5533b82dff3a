"""Stretches of time: how long something went on, and how long two things did at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """Seconds since the epoch."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers, as intervals that do not touch, in order."""
    found: list[Interval] = []
    for one in sorted(intervals):
        if found and one.began <= found[-1].ended:
            found[-1] = Interval(found[-1].began, max(found[-1].ended, one.ended))
        else:
            found.append(one)
    return found


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that both of two unions cover."""
    found, a, b = [], 0, 0
    while a < len(first) and b < len(second):
        began, ended = max(first[a].began, second[b].began), min(first[a].ended, second[b].ended)
        if began < ended:
            found.append(Interval(began, ended))
        if first[a].ended < second[b].ended:
            a += 1
        else:
            b += 1
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Seconds of a union."""
    return sum(one.seconds for one in intervals)
