"""The chat server in front of a real fleet, with real clients: OpenAI's library, agents over connections that break,
NeMo Gym; and the recipe of agents, trained."""

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from functional.runtime.jsonlines import read_json_lines
from functional.runtime.rollout.completion import Sampling
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import join, read_attempts, received_requests
from functional.suite.agents import AgentClient, opening, tool_message
from functional.suite.faults import run_case
from functional.suite.flaky import PLACES, flaky_proxy
from functional.suite.models import TOOLS_DIR, find_tokenizer
from functional.suite.policy import Policy, Sample, collate
from functional.suite.tool_questions import tool_questions, use_tool
from tests.recipes import RECIPES

pytestmark = pytest.mark.faults

RECIPE = RECIPES / "agent_cpu.yaml"
BREAKS = 0.05
"""Chance that a request or an answer breaks, on each of the two ways."""
CONVERSATIONS, TURNS = 200, 6


class Serving:
    """`functional serve-chat` as a user runs it, with connections to its frontend that break."""

    def __init__(self, out):
        self.out = out
        dynamo = "policy.generation.dynamo_cfg"
        overrides = [f"faults.break_connections={BREAKS}", f"{dynamo}.request_timeout_s=120"]
        command = [sys.executable, "-m", "functional.suite.cli", "serve-chat", str(RECIPE), *overrides]
        with (out.parent / "serve.log").open("w") as log:
            self._process = subprocess.Popen([*command, "--out", str(out)], stdout=log, stderr=log)
        self._log = out.parent / "serve.log"
        self._await_serving()
        self.url = json.loads((out / "chat.json").read_text())["url"]

    def _await_serving(self):
        deadline = time.monotonic() + 400
        events = self.out / "events.jsonl"
        while not (events.exists() and '"chat: serving"' in events.read_text()):
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def stop(self):
        """Returns the report."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            status = self._process.wait(120)
            assert status == 0, self._log.read_text()[-3000:]
        return json.loads((self.out / "report.json").read_text())


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    serving = Serving(tmp_path_factory.mktemp("chat") / "out")
    yield serving
    serving.stop()


@pytest.fixture(scope="module")
def tokenizer():
    return find_tokenizer("builtin:tools")


def is_changed(tokenizer, ids):
    """Whether encoding the text of these IDs again gives others."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False) != list(ids)


def assert_trainer_agrees(samples):
    """samples: (prompt IDs, generated IDs, log-probs). By the bound that the suite has for engine and trainer."""
    policy = Policy(TOOLS_DIR, micro_batch_size=64)
    batch = collate([Sample(*sample) for sample in samples])
    scored = policy.logprobs(batch)
    noise = (scored - batch.generation_logprobs)[batch.mask].abs().mean().item()
    assert noise <= policy.agreement_bounds(batch, scored)["logp_noise_bound"]


OPENAI = """
import json, sys
import openai
from functional.suite.tool_questions import TOOLS, use_tool

url, model, questions = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
client = openai.OpenAI(base_url=url + "/v1", api_key="none")
told = []
for question in questions:
    messages = [{"role": "user", "content": question}]
    turns = []
    for _ in range(4):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=1.0)
        message = answer.choices[0].message
        turns.append([message.prompt_token_ids, message.generation_token_ids, message.generation_log_probs, answer.id])
        messages.append(message)
        results = [use_tool(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        if not results or None in results:
            break
        for call, result in zip(message.tool_calls, results):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    told.append(turns)
try:
    client.chat.completions.create(model=model, messages=messages, stream=True)
except openai.BadRequestError as error:
    refused = error.param
print(json.dumps([told, refused]))
"""


def test_openai_s_library_calls_tools_and_each_turn_keeps_the_exact_ids(serving, dynamo_python, tokenizer):
    """The library is the one in Dynamo's environment."""
    questions = [question.text for question in random.Random(1).sample(tool_questions(), 12)]
    command = [str(dynamo_python), "-c", OPENAI, serving.url, "builtin:tools", json.dumps(questions)]
    path = os.pathsep.join([str(RECIPES.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    conversations, refused = json.loads(done.stdout)
    assert refused == "stream"
    assert max(map(len, conversations)) >= 3, "no conversation called its tools"
    changed = 0
    for turns in conversations:
        for before, turn in itertools.pairwise(turns):
            known = before[0] + before[1]
            assert turn[0][: len(known)] == known
            changed += is_changed(tokenizer, before[1])
    assert changed > 0, "no turn was one that encoding again would change"
    assert_trainer_agrees([turn[:3] for turns in conversations for turn in turns])


def test_conversations_over_connections_that_break_are_neither_lost_nor_doubled(serving, tokenizer):
    before = {a.request_id for a in read_attempts(serving.out / "requests.jsonl")}
    questions = random.Random(2).choices([question.text for question in tool_questions()], k=CONVERSATIONS * TURNS)
    with HttpPool() as pool, flaky_proxy(serving.url, BREAKS, seed=3) as proxy:
        agents = AgentClient(pool, proxy.url, "builtin:tools", timeout_s=240)

        async def converse(texts):
            """As many turns as texts: an answer without a call is followed by another question."""
            messages, turns = opening(texts[0]), []
            for text in texts:
                turn, message = await agents.turn(messages, Sampling(32))
                turns.append(turn)
                calls = message.get("tool_calls") or []
                results = [use_tool(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                following = opening(text) if not calls else map(tool_message, calls, [r or "?" for r in results])
                messages = [*messages, message, *following]
            return turns

        async def all_of_them():
            parts = (questions[first : first + TURNS] for first in range(0, len(questions), TURNS))
            return await asyncio.gather(*map(converse, parts))

        conversations = pool.run(all_of_them())

    told = {turn.request_id for turns in conversations for turn in turns}
    assert len(told) == CONVERSATIONS * TURNS
    for turns in conversations:
        for one, other in itertools.pairwise(turns):
            known = one.prompt_token_ids + one.token_ids
            assert other.prompt_token_ids[: len(known)] == known
    changed = sum(is_changed(tokenizer, turn.token_ids) for turns in conversations for turn in turns)
    assert changed > CONVERSATIONS / 10
    assert_trainer_agrees([(t.prompt_token_ids, t.token_ids, t.logprobs) for turns in conversations for t in turns])

    for place in (f"{place} {what}" for place in PLACES for what in ("request", "answer")):
        assert proxy.broken[place] >= CONVERSATIONS * TURNS * BREAKS / 3 / 4, f"hardly a connection broke {place}"
    attempts = [a for a in read_attempts(serving.out / "requests.jsonl") if a.request_id not in before]
    assert sum(a.outcome == "retried" for a in attempts) >= CONVERSATIONS * TURNS * BREAKS
    accepted = {a.request_id for a in attempts if a.outcome == "accepted"}
    assert accepted == told, "an answer was lost on its way to an agent, or one was made twice"
    logged = received_requests(serving.out / "logs" / "worker-0.log")
    assert told <= set(logged)


@pytest.mark.full
def test_nemo_gym_drives_it(serving):
    """NEMO_GYM: a folder with the packages of lockfiles/gym.txt, which `make test-full` makes."""
    packages = Path(os.environ["NEMO_GYM"])
    assert (packages / "nemo_gym").is_dir(), f"no NeMo Gym in {packages}"
    asked = [[question.text, str(question.answer)] for question in random.Random(4).sample(tool_questions(), 24)]
    script = Path(__file__).with_name("gym_rollouts.py")
    command = [sys.executable, str(script), serving.url, "builtin:tools", json.dumps(asked)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=environment | {"PYTHONPATH": str(packages)}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ROLLOUTS "))
    rollouts = json.loads(line.removeprefix("ROLLOUTS "))
    assert 0 < sum(rollout["reward"] for rollout in rollouts) < len(rollouts)
    samples = []
    for rollout in rollouts:
        turns = [item for item in rollout["response"]["output"] if item.get("generation_token_ids")]
        for before, turn in itertools.pairwise(turns):
            known = before["prompt_token_ids"] + before["generation_token_ids"]
            assert turn["prompt_token_ids"][: len(known)] == known
        samples += [(t["prompt_token_ids"], t["generation_token_ids"], t["generation_log_probs"]) for t in turns]
    assert len(samples) > 2 * len(rollouts), "Gym's agent called hardly a tool"
    assert_trainer_agrees(samples)


def test_at_its_end_every_request_is_one_of_a_client_s(serving):
    """The last of this fleet: it is stopped here."""
    report = serving.stop()
    assert report["status"] == "passed", [check for check in report["checks"] if not check["passed"]]
    attempts = read_attempts(serving.out / "requests.jsonl")
    assert join(attempts, [serving.out / "logs" / "worker-0.log"]).is_one_to_one


def test_agents_are_trained(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPE), f"faults.break_connections={BREAKS}"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((out / "report.json").read_text())
    passed = {check["name"] for check in report["checks"] if check["passed"]}
    own = {"tokens_correct", "requests_identified", "rewards_differ", "exact_prefixes", "tools_called"}
    assert {f"step{step}.chat.{name}" for step in (1, 2) for name in own} | {"chat.rewards_joined"} <= passed
    assert [step["step"] for step in report["steps"]] == [1, 2]

    records = read_json_lines(out / "rollouts.jsonl")
    assert len({record["request_id"] for record in records}) == len(records)
    logged = set(received_requests(out / "logs" / "worker-0.log"))
    assert {record["request_id"] for record in records} <= logged
    assert {record["instance_id"] for record in records} == set(report["topology"]["workers"].values())
    for step in (1, 2):
        rewards = {}
        for record in (record for record in records if record["step"] == step):
            rewards.setdefault(record["rollout"], set()).add(record["reward"])
        assert len(rewards) == 64
        assert all(len(reward) == 1 for reward in rewards.values()), "turns of a conversation share its reward"
        assert {0.0, 1.0} == set().union(*rewards.values())


@pytest.mark.full
def test_conversations_that_are_lost_with_a_worker_are_had_again(tmp_path):
    outcome = run_case("worker-killed-generating", RECIPE, tmp_path / "out", [], deadline_s=60)
    assert outcome.problems == []
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["lost_samples"]
    records = read_json_lines(tmp_path / "out" / "rollouts.jsonl")
    assert 2 in {record["attempt"] for record in records if record["step"] == 1}
