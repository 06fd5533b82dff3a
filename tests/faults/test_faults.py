"""Whole runs with real components: what is killed, what breaks, and what must be true afterwards."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from functional.runtime.jsonlines import read_json_lines
from functional.runtime.recipe.seeds import engine_seed
from functional.runtime.rollout.records import read_records
from functional.runtime.rollout.requests import join, read_attempts
from functional.suite.doctor.examine import examine
from functional.suite.doctor.finding import Result
from functional.suite.doctor.folder import RunFolder
from functional.suite.faults import CASES, run_case
from functional.suite.flaky import PLACES
from functional.suite.models import find_model
from tests.faults.running import HELD, look_at_its_end, look_while_it_runs, started
from tests.recipes import RECIPES

RECIPE = RECIPES / "grpo_cpu.yaml"
EXIT_DEADLINE_S = 60
FOREIGN = {
    "ETCD_NAME": "node7",
    "ETCD_PORT": "tcp://10.96.0.9:2379",
    "NATS_SERVER": "nats://10.96.0.9:4222",
    "DYN_DISCOVERY_BACKEND": "file",
    "VLLM_PORT": "tcp://10.96.0.9:8000",
    "PROMETHEUS_MULTIPROC_DIR": "/nowhere",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
}
"""What a caller's shell or pod may hold of other programs' settings."""
DIAGNOSED = {
    "worker-killed-generating": {"worker-lost"},
    "worker-killed-mid-transfer": {"worker-lost"},
    "worker-killed-ahead": {"worker-lost"},
    "rank-killed-generating": {"worker-lost"},
    "rank-killed-mid-transfer": {"worker-lost"},
    "trainer-rank-killed-generating": {"trainer-ended"},
    "trainer-rank-killed-mid-transfer": {"sender-lost"},
    "etcd-killed": {"etcd-ended"},
    "nats-killed": {"nats-server-ended"},
    "frontend-killed": {"frontend-ended"},
    "driver-killed-starting": {"driver-killed"},
    "driver-killed-generating": {"driver-killed"},
    "driver-killed-updating": {"driver-killed", "died-updating"},
}
"""What the doctor must name, of each case."""
LATER = (
    "rank-killed-mid-transfer",
    "trainer-rank-killed-generating",
    "trainer-rank-killed-mid-transfer",
    "worker-killed-generating",
    "worker-killed-mid-transfer",
    "driver-killed-generating",
    "worker-killed-ahead",
)
"""`make test-full` alone runs these. What is like them in `make test`: test_refit_faults kills workers while they
generate and in a transfer; of an engine of two ranks one is killed here; the driver is killed before and after it
generates; test_trainer_ranks kills a rank of the trainer."""
WITH_EXPERTS = "rank-killed-generating"
EXPERTS = [
    "policy.model_name=builtin:random-qwen3-moe",
    "data.dataset_name=token_set",
    "policy.optimizer.lr=0.5",
    "cluster.gpus_per_node=4",
    "grpo.max_num_steps=1",
]
"""In that case, which is a whole run of two ranks: the family in which most can go wrong (experts that transformers
fuses, fewer KV heads than ranks, a padded vocabulary), sent by a trainer of two ranks. All other families are in
test_family_runs."""
TWO_WORKERS = ("cluster.gpus_per_node=3", "policy.generation.colocated.resources.gpus_per_node=2")


def run(out, *overrides, **environment):
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPE), *overrides, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "report.json").read_text())


def logged_seeds(log):
    """What the engine itself says its seed is."""
    return {int(seed) for seed in re.findall(r"\bseed=(\d+)", log.read_text(errors="replace"))}


@pytest.mark.faults
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LATER else []) for name in sorted(CASES)]
)
def test_it_ends_clearly_and_leaves_nothing(name, tmp_path):
    outcome = run_case(name, RECIPE, tmp_path / "out", EXPERTS if name == WITH_EXPERTS else [], EXIT_DEADLINE_S)
    assert outcome.problems == []
    found = [one for one in examine(RunFolder.open(tmp_path / "out")) if one.cause]
    assert {one.cause for one in found} >= DIAGNOSED[name]
    wanted = Result.RECOVERED if CASES[name].status == 0 else Result.PROBLEM
    assert {one.result for one in found} == {wanted}, found


@pytest.fixture(scope="session")
def opinionated_model(tmp_path_factory):
    """The embedded model with a generation_config.json as many models have it, and the digit 1 as a second EOS."""
    folder = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(find_model("builtin:arithmetic", folder.parent, print), folder)
    eos = AutoTokenizer.from_pretrained(str(folder)).eos_token_id
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    sampling["eos_token_id"] = [eos, extra_eos(folder)]
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return folder


def extra_eos(folder):
    (token,) = AutoTokenizer.from_pretrained(str(folder)).encode("1", add_special_tokens=False)
    return token


@pytest.mark.road
def test_two_workers_under_kv_routing_and_the_doctor_looking_on(tmp_path, opinionated_model):
    """Devices are virtual, so GPUs may be hidden; whatever else the caller has set, and whatever sampling the model's
    folder asks for, rollouts are on policy, and end where the model says. The doctor raises no alarm."""
    out = tmp_path / "out"
    overrides = (*TWO_WORKERS, *HELD, f"policy.model_name={opinionated_model}")
    with started(out, *overrides, CUDA_VISIBLE_DEVICES="", **FOREIGN) as process:
        look_while_it_runs(out, process)
        assert process.wait(600) == 0, (out / "run.log").read_text()[-3000:]
    look_at_its_end(out)
    report = json.loads((out / "report.json").read_text())
    passed = {check["name"] for check in report["checks"] if check["passed"]}
    assert {"routing.every_worker_served", "routing.shared_prefix_overlaps", "routing.no_overlap_after_clear"} <= passed
    assert len(report["topology"]["workers"]) == 2
    assert all(len(refit["probes"]) == 2 for refit in report["refits"])

    assert "sampling.seeds_differ" in passed
    seeds = [logged_seeds(out / "logs" / f"worker-{slot}.log") for slot in range(2)]
    assert seeds == [{engine_seed(42, 0, 0)}, {engine_seed(42, 1, 0)}]

    samples = [record["token_ids"] for record in read_records(out / "rollouts.jsonl")]
    assert any(tokens[-1] == extra_eos(opinionated_model) for tokens in samples)
    assert not any(extra_eos(opinionated_model) in tokens[:-1] for tokens in samples)


@pytest.mark.faults
@pytest.mark.parametrize("rollouts", [1000, pytest.param(10_000, marks=pytest.mark.full)])
def test_rollouts_through_connections_that_break(tmp_path, rollouts):
    out = tmp_path / "out"
    prompts = 125
    report = run(
        out,
        "faults.break_connections=0.05",
        f"grpo.num_prompts_per_step={prompts}",
        f"grpo.num_generations_per_prompt={rollouts // prompts}",
        "grpo.max_num_steps=1",
        "policy.generation.dynamo_cfg.request_timeout_s=240",
        "policy.generation.dynamo_cfg.max_inflight_requests=512",  # the proxy holds two more sockets for each
    )
    records = read_records(out / "rollouts.jsonl")
    assert len(records) == rollouts
    assert len({record["request_id"] for record in records}) == rollouts
    assert all(record["accepted"] for record in records)

    (broken,) = (event for event in read_json_lines(out / "events.jsonl") if event["event"] == "connections broken")
    for place in (f"{place} {what}" for place in PLACES for what in ("request", "answer")):
        assert int(broken.get(place, 0)) >= rollouts * 0.05 / 3 / 4, f"hardly a connection broke {place}"
    attempts = read_attempts(out / "requests.jsonl")
    retried = [attempt for attempt in attempts if attempt.outcome == "retried"]
    assert len(retried) >= rollouts * 0.05, "the connection hardly broke"
    assert max(record["attempt"] for record in records) > 1

    joined = join(attempts, [out / "logs" / "worker-0.log"])
    assert joined.is_one_to_one
    accepted = {a.request_id for a in attempts if a.outcome == "accepted" and a.purpose == "rollout"}
    assert {record["request_id"] for record in records} <= accepted
    assert report["requests"]["logged"] >= rollouts
