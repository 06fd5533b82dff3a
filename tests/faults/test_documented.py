"""Commands of the documentation for the image that take a minute and more, typed as they stand."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.full

FUNCTIONAL = Path(__file__).parents[2] / "functional"
"""As /opt/functional: `recipes/` is in it."""
FOREIGN = FUNCTIONAL.parent / "tests/runtime"
PLACES = ("/tmp/run", "/tmp/routers", "/tmp/chat", "/tmp/tiny")


@pytest.fixture(autouse=True)
def places():
    """The folders that the commands name, which nobody else may have."""
    there = [place for place in PLACES if Path(place).exists()]
    assert there == []
    yield
    for place in PLACES:
        shutil.rmtree(place, ignore_errors=True)


def start(command, cwd=FUNCTIONAL, **streams):
    environment = os.environ | {"PYTHONPATH": str(FUNCTIONAL.parent)}
    return subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=cwd, env=environment, text=True, **streams)


def typed(command, cwd=FUNCTIONAL):
    """What it prints; it must end well."""
    process = start(command, cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, said[-3000:]
    return said


def passed(folder="/tmp/run"):
    report = json.loads((Path(folder) / "report.json").read_text())
    return report["status"] == "passed", report


def test_a_run():
    """With the doctor on it, and its pages made again."""
    typed("functional run recipes/grpo_cpu.yaml grpo.max_num_steps=3 --out /tmp/run")
    well, report = passed()
    assert (well, len(report["steps"])) == (True, 3)
    said = typed("functional doctor /tmp/run")
    assert "✗" not in said
    page = Path("/tmp/run/report.html")
    before = page.read_bytes()
    page.unlink()
    typed("functional report /tmp/run")
    assert page.read_bytes() == before


def test_generation_beside_training():
    typed("functional run recipes/grpo_cpu.yaml grpo.async_grpo.enabled=true grpo.max_num_steps=8 --out /tmp/run")
    well, report = passed()
    assert (well, len(report["steps"])) == (True, 8)


def test_agents():
    typed("functional run recipes/agent_cpu.yaml --out /tmp/run")
    assert passed()[0]


def test_a_foreign_recipe(tmp_path):
    """In a folder laid out as NeMo RL's, with a recipe of its kind under that name."""
    configs = tmp_path / "examples/configs"
    configs.mkdir(parents=True)
    shutil.copy(FOREIGN / "foreign.yaml", configs / "grpo_math_1B_dynamo.yaml")
    shutil.copy(FOREIGN / "foreign_parent.yaml", configs)
    typed(
        "functional run examples/configs/grpo_math_1B_dynamo.yaml policy.model_name=builtin:random-qwen3"
        " data.dataset_name=token_set grpo.max_num_steps=2 --out /tmp/run",
        tmp_path,
    )
    assert passed()[0]


def test_routers_are_compared():
    typed("functional compare-routers recipes/routers_cpu.yaml --modes kv,round-robin --out /tmp/routers")
    compared = json.loads(Path("/tmp/routers/routers.json").read_text())
    assert {"kv", "round-robin"} <= set(json.dumps(compared).replace('"', " ").split())
    assert Path("/tmp/routers/routers.svg").stat().st_size > 1000


def test_chat_is_served():
    process = start("functional serve-chat recipes/agent_cpu.yaml --port 8000 --out /tmp/chat")
    try:
        deadline = time.monotonic() + 300
        while not Path("/tmp/chat/chat.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        url = json.loads(Path("/tmp/chat/chat.json").read_text())["url"]
        assert url == "http://127.0.0.1:8000"
        asked = {"model": "builtin:tools", "messages": [{"role": "user", "content": "3+4-5"}], "max_tokens": 8}
        while (answer := httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)).status_code == 503:
            assert time.monotonic() < deadline, "the first weights are not served"
            time.sleep(float(answer.headers["Retry-After"]))
        message = answer.raise_for_status().json()["choices"][0]["message"]
        assert '"refit 0: probe"' in Path("/tmp/chat/events.jsonl").read_text(), (
            "answered by weights that nobody proved"
        )
        assert len(message["generation_token_ids"]) == len(message["generation_log_probs"]) > 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert passed("/tmp/chat")[0]


def test_a_model_is_made():
    typed("functional make-model /tmp/tiny")
    assert Path("/tmp/tiny/model.safetensors").stat().st_size > 500_000
