"""A run whose rollouts are conversations of agents with the chat server."""

from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.records import RolloutRecord
from functional.runtime.rollout.requests import Attempt, received_requests
from functional.suite import checks
from functional.suite.agent_batch import (
    ConversationBatch,
    check_conversations,
    check_rewards_joined,
    conversation_records,
    score_conversations,
)
from functional.suite.agents import AgentClient, Conversation, ToolTask
from functional.suite.flaky import flaky_proxy
from functional.suite.preflight import Prepared
from functional.suite.report import Report
from functional.suite.session import Parts, Session
from functional.suite.tool_questions import ToolQuestion

PATIENCE = 2.0
"""How many times as long as the server an agent waits: its own connection may break too."""


class AgentSession(Session):
    """Trains on conversations; with `faults.break_connections`, the agents' connections break as the server's do."""

    def __init__(self, prepared: Prepared, report: Report, out: Path, run_dir: Path) -> None:
        super().__init__(prepared, report, out, run_dir)
        self._agents: AgentClient | None = None
        self._kept: list[RolloutRecord] = []
        self._proxies = ExitStack()
        self._stack.callback(self._proxies.close)

    def _last_completions(self, parts: Parts, step: int) -> list[Completion]:
        return [turn for conversation in self._converse(parts, step, 1) for turn in conversation.turns]

    def _rollouts(self, parts: Parts, step: int) -> ConversationBatch:
        generations = self.recipe.grpo.num_generations_per_prompt
        conversations = self._converse(parts, step, generations)
        batch = score_conversations(conversations, self.recipe.grpo)
        version = parts.refit.version if parts.refit.version is not None else -1
        records = list(conversation_records(batch, self.run_dir.name, step, version, generations))
        parts.records.write(records)
        self._kept += records
        name = f"step{step}.chat"
        checks.check_rollouts(self.checks, name, batch, parts.instances, self.recipe.checks)
        check_conversations(self.checks, name, batch, self._is_changed)
        return batch

    def _converse(self, parts: Parts, step: int, generations: int) -> list[Conversation]:
        assert isinstance(parts.task, ToolTask)
        questions: list[ToolQuestion] = [q for q in parts.task.questions(step) for _ in range(generations)]
        self.say(f"step {step}: {len(questions)} conversations")
        self.event(f"step {step}: generating")
        return self._generate(parts, self._agent_client(parts), questions, step)

    def _agent_client(self, parts: Parts) -> AgentClient:
        if self._agents is None:
            assert parts.chat is not None
            url, faults = parts.chat.url, self.recipe.faults
            if faults.break_connections:
                proxy = self._proxies.enter_context(
                    flaky_proxy(url, faults.break_connections, self.recipe.grpo.seed + 1)
                )
                self._proxies.callback(lambda: self.event("agents' connections broken", **proxy.counted()))
                url = proxy.url
            timeout_s = PATIENCE * self.recipe.policy.generation.dynamo_cfg.request_timeout_s
            self._agents = AgentClient(parts.pool, url, self.recipe.policy.model_name, timeout_s)
        return self._agents

    def _is_changed(self, turn: Completion) -> bool:
        """Whether encoding its text again gives other IDs."""
        text = self.tokenizer.decode(list(turn.token_ids), skip_special_tokens=False)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) != turn.token_ids

    def _check_join(self, parts: Parts) -> list[Attempt]:
        attempts = super()._check_join(parts)
        served: dict[str, set[int]] = defaultdict(set)
        for slot in {worker.index for worker in parts.instances}:
            instances = {worker.instance_id for worker in parts.instances if worker.index == slot}
            for request in received_requests(self.out / "logs" / f"worker-{slot}.log"):
                served[request] |= instances
        check_rewards_joined(self.checks, self._kept, attempts, served)
        return attempts
