"""Which version an engine computes with, judged by log-probs: those of the tokens of a fixed prompt.

The hash proves what an engine holds; this shows what it computes with. Each token votes: by how much the engine's
log-prob lies nearer to the trainer's under one version than under the other. An engine that has the new version, where
the two hardly differ, votes either way with equal chance, so the sum of the votes over the root of the sum of their
squares exceeds z with a chance of at most exp(−z²/2), whatever the noise looks like (docs/refit.md).
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

TOKENS = 64
"""Tokens of a round that vote, where the context has room for them: each of its prompt's but the first."""
MAX_ROUNDS = 16
FALSE_ALARMS = 0.001
"""The chance, at most, that an update of a sound fleet is failed by a probe: all rounds of all workers together."""
NEW_Z = -3.0
"""Votes that say that it has the new one: by chance in at most 1 of 90."""
ASK_AGAIN_Z = 0.5
"""Votes that lean to the other version this far are worth another round."""
FAR, FAR_NATS = 4.0, 0.01
"""An engine further from the trainer than this many times what is usual between them fits neither version, unless the
distance is below a hundredth of a nat, which changes a probability by 1%."""


class Finding(StrEnum):
    """What a probe found out."""

    FIRST = "first version"  # nothing to tell it from; the usual distance is learnt
    NEW = "new version"
    OTHER = "other version"
    UNCLEAR = "cannot tell"  # the versions are too alike for the noise
    NEITHER = "neither version"


@dataclass(frozen=True)
class ProbeScore:
    """The trainer's log-probs of a prompt's tokens but the first, nats: `current` under the version being sent,
    `previous` under the other version it holds, if any."""

    current: list[float]
    previous: list[float] | None


@dataclass(frozen=True)
class Sighting:
    """One token: its log-prob by the engine, and by the trainer under the new and the other version, in nats."""

    engine: float
    new: float
    other: float | None

    @property
    def distance(self) -> float:
        return abs(self.engine - self.new)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.engine, self.new, self.new if self.other is None else self.other)))

    def vote(self, noise: float) -> float:
        """From −1 for the new version to 1 for the other; near 0 where they differ by less than the noise."""
        if self.other is None or self.new == self.other:
            return 0.0
        gain = self.distance - abs(self.engine - self.other)
        return gain / (abs(self.new - self.other) + noise)


class Noise:
    """The usual distance between engine and trainer, in nats: of this engine and this model, from its latest tokens."""

    def __init__(self, kept: int = 16 * TOKENS) -> None:
        self._kept = kept
        self._distances: list[float] = []

    @property
    def median(self) -> float | None:
        return statistics.median(self._distances) if self._distances else None

    def learn(self, sightings: Iterable[Sighting]) -> None:
        """From tokens of an engine that was accepted."""
        self._distances = [*self._distances, *(sighting.distance for sighting in sightings)][-self._kept :]


@dataclass(frozen=True)
class Reading:
    """What a worker's probe gave. `current`, `previous`, `shift`: mean |engine − trainer| under the new version and the
    other, and |new − other|, nats; the last two are None for a first version. votes: the test's z."""

    finding: Finding
    current: float
    previous: float | None
    shift: float | None
    votes: float
    tokens: int


def judge(
    first: Sequence[Sighting], more: Callable[[int], Sequence[Sighting]], noise: Noise, workers: int
) -> tuple[Reading, list[Sighting]]:
    """The reading of a first round, and the tokens it rests on. `more(n)` gives round n ≥ 1; it is asked while the
    votes lean to the other version and do not yet tell. workers: how many are judged in this update."""
    sightings = list(first)
    reading = read(sightings, noise, workers)
    for round_number in range(1, MAX_ROUNDS):
        if not ASK_AGAIN_Z < reading.votes < other_z(workers):
            break
        sightings += more(round_number)
        reading = read(sightings, noise, workers)
    return reading, sightings


def other_z(workers: int) -> float:
    """Votes that say that an engine has the other version: 4.4 for one worker, 5.5 for 256."""
    return math.sqrt(2 * math.log(MAX_ROUNDS * workers / FALSE_ALARMS))


def read(sightings: Sequence[Sighting], noise: Noise, workers: int = 1) -> Reading:
    """Judge tokens, one at least."""
    usual = noise.median
    distance = [sighting.distance for sighting in sightings]
    pairs = [(sighting.engine, sighting.new, sighting.other) for sighting in sightings if sighting.other is not None]
    votes = z_score([sighting.vote(usual or 0.0) for sighting in sightings])
    return Reading(
        finding=find(votes >= other_z(workers), votes, bool(pairs), statistics.median(distance), usual),
        current=statistics.fmean(distance),
        previous=statistics.fmean(abs(engine - other) for engine, _, other in pairs) if pairs else None,
        shift=statistics.fmean(abs(new - other) for _, new, other in pairs) if pairs else None,
        votes=votes,
        tokens=len(sightings),
    )


def find(is_other: bool, votes: float, has_other: bool, distance: float, usual: float | None) -> Finding:
    if is_other:
        return Finding.OTHER
    if usual is not None and distance > max(FAR * usual, FAR_NATS):
        return Finding.NEITHER
    if not has_other:
        return Finding.FIRST
    return Finding.NEW if votes <= NEW_Z else Finding.UNCLEAR


def z_score(votes: Sequence[float]) -> float:
    """Sum over the root of the sum of squares; 0 when nothing votes."""
    square = math.fsum(vote * vote for vote in votes)
    return math.fsum(votes) / math.sqrt(square) if square > 0 else 0.0


def probe_prompt(round_number: int, vocabulary: int, length: int) -> tuple[int, ...]:
    """The fixed prompt of a round (from 0): `length` token IDs below `vocabulary`, at random.

    What follows random tokens is uncertain, so a small change of the weights shows: in prompts that a trained model
    knows, versions differ a hundred times less. No two rounds share a prompt: the same tokens would be no new evidence.
    """
    rng = random.Random(round_number)
    return tuple(rng.randrange(vocabulary) for _ in range(length))
