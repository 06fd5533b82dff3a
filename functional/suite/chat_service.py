"""The chat server of a run: made of its recipe, on the run's own pool, gate and journal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from functional.runtime.chat.client import ChatClient, ChatPolicy
from functional.runtime.chat.server import ChatServer
from functional.runtime.chat.template import ChatTemplate
from functional.runtime.recipe.model import Recipe
from functional.runtime.rollout.completion import Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal
from functional.runtime.rollout.spread import Served


@contextmanager
def chat_server(
    pool: HttpPool, gate: AdmissionGate, served: Served, recipe: Recipe, model_dir: Path, journal: RequestJournal
) -> Iterator[ChatServer]:
    """Listening while it is open. Raises ConfigError for a model that cannot chat, RunError for an address in use."""
    generation = recipe.policy.generation
    dynamo = generation.dynamo_cfg
    policy = ChatPolicy(
        load_template(recipe, model_dir),
        Sampling(
            generation.max_new_tokens, generation.temperature, stop_token_ids=tuple(generation.stop_token_ids or ())
        ),
        dynamo.worker_args.exclude_tools_when_tool_choice_none,
    )
    client = ChatClient(pool, gate, served, policy, journal)
    server = ChatServer(client, gate, dynamo.chat_host, dynamo.chat_port)
    server.start()
    try:
        yield server
    finally:
        server.close()


def load_template(recipe: Recipe, model_dir: Path) -> ChatTemplate:
    return ChatTemplate.load(model_dir, recipe.policy.generation.dynamo_cfg.worker_args.custom_jinja_template)
