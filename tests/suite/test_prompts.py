"""A hub model's prompts are measured once its files are here, and still before anything starts."""

import json
import signal

import pytest

from functional.suite import driver, preflight, session
from functional.suite.models import ARITHMETIC_DIR, find_tokenizer
from tests.recipes import RECIPES


@pytest.fixture(autouse=True)
def _sigterm_is_put_back():
    """A run ignores it at its end, and whatever is started later would too."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_prompts_of_a_model_that_has_to_come_from_the_hub_first(tmp_path, monkeypatch):
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps({"prompt": "1" * (n + 1), "answer": "1"}) + "\n" for n in range(128)))
    seen = []

    def here_now(name):
        seen.append(name)
        return find_tokenizer(name)

    monkeypatch.setattr(preflight, "find_tokenizer", lambda name: None)
    monkeypatch.setattr(session, "find_tokenizer", here_now)
    monkeypatch.setattr(session, "joined_ray", lambda *_: pytest.fail("Ray was started"))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    recipe = RECIPES / "grpo_cpu.yaml"
    assert driver.run(recipe, tmp_path / "out", run_dir, [f"data.dataset_name={data}"]) == 2
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert f"{data}:128: the prompt has 128 tokens" in report["error"]
    assert seen == [str(ARITHMETIC_DIR)]
    assert not run_dir.exists()
