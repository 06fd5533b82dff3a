"""One record a rollout, appended to a JSON Lines file as it becomes known; a torn last line is tolerated on reading."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from functional.runtime.jsonlines import JsonLines, read_json_lines


@dataclass(frozen=True)
class RolloutRecord:
    """Everything that identifies one sample. Log-probs in nats, times in seconds since the epoch.

    policy_version: the version whose weights made it, the oldest of several, and last_version the newest: they differ
    only where updates do not wait for rollouts; request_id and instance_id join it to Dynamo's logs; max_tokens:
    what its prompt left it of `max_new_tokens`; truncated: it ended there, not at a stop token; turn: of a
    conversation, whose turns share `rollout` and reward.
    """

    run: str
    step: int
    group: int
    rollout: int
    attempt: int
    policy_version: int
    request_id: str
    instance_id: int | None
    sent_at: float
    answered_at: float
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    max_tokens: int
    truncated: bool
    reward: float | None
    advantage: float | None
    accepted: bool
    reason: str | None
    turn: int = 1
    last_version: int | None = None


class RecordWriter:
    """Appends records; each is on the disk (fsync) before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path, synced=True)
        self.instance_ids: set[int | None] = set()

    def write(self, records: list[RolloutRecord]) -> None:
        self.instance_ids |= {record.instance_id for record in records}
        self._lines.append_records(records)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of the file. Raises ValueError for a broken line that is not the last."""
    return read_json_lines(path)
