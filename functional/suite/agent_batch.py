"""A step's conversations as samples for the trainer, their records, and what they are checked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from functional.runtime.recipe.model import GrpoConfig
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.records import RolloutRecord
from functional.runtime.rollout.requests import Attempt
from functional.suite.agents import Conversation
from functional.suite.batch import RolloutBatch, group_advantages
from functional.suite.checklist import Checklist


@dataclass(frozen=True)
class ConversationBatch(RolloutBatch):
    """A sample a turn, the conversation's reward and advantage with each of its turns."""

    conversations: list[Conversation]

    @property
    def mean_reward(self) -> float:
        """Over conversations."""
        return sum(c.reward for c in self.conversations) / len(self.conversations)


def score_conversations(conversations: list[Conversation], config: GrpoConfig) -> ConversationBatch:
    """Rewards and group advantages, `config.num_generations_per_prompt` conversations a question side by side."""
    rewards = [None if c.problem else c.reward for c in conversations]
    scored = group_advantages(rewards, config)
    turns = [len(c.turns) for c in conversations]
    return ConversationBatch(
        completions=[turn for c in conversations for turn in c.turns],
        rewards=[reward for reward, count in zip(rewards, turns, strict=True) for _ in range(count)],
        advantages=[advantage for advantage, count in zip(scored, turns, strict=True) for _ in range(count)],
        conversations=conversations,
    )


def conversation_records(
    batch: ConversationBatch, run: str, step: int, policy_version: int, generations: int
) -> Iterator[RolloutRecord]:
    """A record a turn."""
    samples = iter(zip(batch.completions, batch.rewards, batch.advantages, strict=True))
    for index, conversation in enumerate(batch.conversations):
        for turn in range(1, len(conversation.turns) + 1):
            completion, reward, advantage = next(samples)
            yield RolloutRecord.of(
                replace(
                    completion,
                    attempt=conversation.attempt,
                    policy_version=policy_version,
                    problem=conversation.problem,
                ),
                run=run,
                step=step,
                group=index // generations,
                rollout=index,
                reward=reward,
                advantage=advantage,
                turn=turn,
            )


def check_conversations(
    checks: Checklist, name: str, batch: ConversationBatch, changed: Callable[[Completion], bool]
) -> None:
    """Tools were called, and each turn goes on from the exact token IDs before it, also where encoding its text again
    gives others (`changed`)."""
    conversations = batch.conversations
    problems = [problem for conversation in conversations if (problem := conversation.problem)]
    further = sum(len(conversation.turns) - 1 for conversation in conversations)
    kept = sum(changed(turn) for conversation in conversations for turn in conversation.turns[:-1])
    checks.add(
        f"{name}.exact_prefixes",
        further > 0 and not problems,
        "; ".join(problems[:3])
        or f"{further} turns begin with the exact IDs before them; {kept} of the turns that they follow would change",
        turns=further,
        changed=kept,
    )
    calls = sum(conversation.calls for conversation in conversations)
    users = sum(conversation.calls > 0 for conversation in conversations)
    checks.add(
        f"{name}.tools_called",
        calls > 0,
        f"{calls} calls of tools in {users} of {len(conversations)} conversations",
        calls=calls,
    )


def check_rewards_joined(
    checks: Checklist, records: Sequence[RolloutRecord], attempts: Collection[Attempt], served: Mapping[str, set[int]]
) -> None:
    """Each rewarded turn is one accepted request, which the log of the worker that the answer names has.

    served: request ID → instances that wrote the log that it is in.
    """
    accepted = {a.request_id for a in attempts if a.outcome == "accepted" and a.purpose == "rollout"}
    rewarded = [record for record in records if record.reward is not None]
    ids = {record.request_id for record in rewarded}
    unknown = ids - accepted
    elsewhere = [r.request_id for r in rewarded if r.instance_id not in served.get(r.request_id, ())]
    checks.add(
        "chat.rewards_joined",
        bool(rewarded) and len(ids) == len(rewarded) and not unknown and not elsewhere,
        f"{len(rewarded)} rewarded turns, {len(ids)} requests"
        + (f"; not accepted: {sorted(unknown)[:3]}" if unknown else "")
        + (
            f"; not in the log of the worker that they name: {elsewhere[:3]}"
            if elsewhere
            else ", each in its worker's log"
        ),
        rewarded=len(rewarded),
    )
