"""How often metrics are read: on the recipe's interval, by either of its names, or at the end only."""

import time
from types import SimpleNamespace

import pytest

from functional.runtime.recipe.model import GenerationConfig
from functional.runtime.telemetry import Telemetry

FLEET = SimpleNamespace(workers=[], frontend=SimpleNamespace(metrics=lambda: ""))
OURS, THEIRS = {"dynamo_cfg": {"metrics_interval_s": 3}}, {"vllm_cfg": {"vllm_metrics_logger_interval": 0.5}}
OFF = {"vllm_cfg": {"vllm_metrics_logger_interval": 0.5, "enable_vllm_metrics_logger": False}}


@pytest.mark.parametrize(("keys", "interval"), [({}, 5), (OURS, 3), (THEIRS, 0.5), (OFF, None)])
def test_the_interval_a_recipe_asks_for(keys, interval):
    assert GenerationConfig.model_validate(keys).metrics_interval_s == interval


def polls_within(seconds, **vllm_cfg):
    generation = GenerationConfig.model_validate({"vllm_cfg": vllm_cfg})
    with Telemetry(FLEET, generation, [], lambda: 0) as telemetry:
        deadline = time.monotonic() + seconds
        while telemetry.polls < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return telemetry.polls


def test_metrics_are_read_on_that_interval():
    assert polls_within(30, vllm_metrics_logger_interval=0.02) >= 3


def test_a_logger_that_is_off_reads_nothing_by_itself():
    assert polls_within(0.3, vllm_metrics_logger_interval=0.02, enable_vllm_metrics_logger=False) == 0
