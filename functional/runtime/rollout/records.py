"""One record a rollout, appended to a JSON Lines file as it becomes known; a torn last line is tolerated on reading."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from functional.runtime.jsonlines import JsonLines, read_json_lines
from functional.runtime.rollout.completion import Completion


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

    @classmethod
    def of(
        cls,
        completion: Completion,
        *,
        run: str,
        step: int,
        group: int,
        rollout: int,
        reward: float | None,
        advantage: float | None,
        turn: int = 1,
    ) -> Self:
        """A completion and what it is worth. -1 is the version of one that has none."""
        return cls(
            run=run,
            step=step,
            group=group,
            rollout=rollout,
            attempt=completion.attempt,
            policy_version=-1 if completion.policy_version is None else completion.policy_version,
            request_id=completion.request_id,
            instance_id=completion.instance_id,
            sent_at=completion.sent_at,
            answered_at=completion.answered_at,
            prompt_token_ids=completion.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            max_tokens=completion.max_tokens,
            truncated=completion.truncated,
            reward=reward,
            advantage=advantage,
            accepted=completion.problem is None,
            reason=completion.problem,
            turn=turn,
            last_version=completion.last_version,
        )


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
