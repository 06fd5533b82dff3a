"""Comparison of routers: which prompts, which intervals, and a statement that claims what they tell."""

import math
from xml.etree import ElementTree

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.load import load_recipe
from functional.runtime.rollout.completion import Completion
from functional.suite.compare_routers import check_words, per_worker, rotated
from functional.suite.router_findings import METRICS, Measurement, find, interval, statement, t_quantile, table
from functional.suite.router_plot import plot
from functional.suite.router_workload import Workload, digest, make_shape, next_prompt
from tests.recipes import RECIPES

RECIPE = RECIPES / "routers_cpu.yaml"


@pytest.fixture
def shape():
    return make_shape(load_recipe(RECIPE), 128, turns=3)


def completion(prompt, tokens, instance=1, cached=0):
    return Completion("r", tuple(prompt), tuple(tokens), (-1.0,) * len(tokens), instance, cached, None, 0.0, 0.0, None)


def conversation(workload, shape, number, repeat=1):
    said = []
    for _ in range(shape.turns):
        prompt = next_prompt(workload, shape, repeat, number, said)
        said.append(completion(prompt, [number % 100] * shape.new_tokens))
    return [one.prompt_token_ids for one in said]


def test_conversations_fill_the_context(shape):
    for workload in Workload:
        prompts = conversation(workload, shape, 0)
        assert [len(prompt) for prompt in prompts] == [shape.prompt_length(turn) for turn in range(3)]
        assert 1024 - shape.turns < len(prompts[-1]) + shape.new_tokens <= 1024


def test_a_group_shares_its_first_prompt_and_each_turn_goes_on_from_its_own_answer(shape):
    first, second, other = (conversation(Workload.SHARED, shape, n) for n in (0, 1, shape.generations))
    assert first[0] == second[0] != other[0]
    assert first[1] != second[1]
    assert first[1][: shape.input_tokens + shape.new_tokens] == first[0] + (0,) * shape.new_tokens
    assert first[2][: len(first[1])] == first[1]


def test_without_shared_prefixes_no_two_prompts_begin_alike(shape):
    prompts = [prompt for n in range(16) for prompt in conversation(Workload.DISTINCT, shape, n)]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_a_repeat_has_the_same_prompts_for_every_mode_and_others_than_the_next(shape):
    assert digest(Workload.SHARED, shape, 1) == digest(Workload.SHARED, shape, 1) != digest(Workload.SHARED, shape, 2)


def test_modes_take_turns_in_being_first():
    assert ["".join(rotated("abc", repeat)) for repeat in range(4)] == ["abc", "bca", "cab", "abc"]


def test_a_worker_that_served_nothing_counts():
    served = [completion([1, 2, 3], [4], instance=7, cached=2)] * 3
    assert per_worker({7: 0, 8: 1}, served, lambda one: len(one.prompt_token_ids) - one.cached_tokens) == {0: 3, 1: 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((["kv", "direct"], 5, 3), "no router mode 'direct': choose from kv, round-robin"),
        ((["kv"], 5, 3), "two different modes"),
        ((["kv", "kv"], 5, 3), "two different modes"),
        ((["kv", "random"], 1, 3), "an interval needs 2 repeats"),
        ((["kv", "random"], 2, 60), "raise policy.generation.vllm_cfg.max_model_len=1024, or ask for fewer --turns"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(words, message):
    with pytest.raises(ConfigError, match=message):
        check_words(RECIPE, [], *words)


def test_one_worker_is_refused():
    with pytest.raises(ConfigError, match="two workers at least"):
        check_words(RECIPES / "grpo_cpu.yaml", ["policy.generation.vllm_cfg.max_model_len=512"], ["kv", "random"], 2, 2)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.975, 30, 2.0423), (0.995, 2, 9.9248), (0.9995, 9, 4.7809)],
)
def test_students_t(probability, freedom, value):
    assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-4)


def test_an_interval():
    found = interval([1.0, 2.0, 3.0, 4.0], 0.95)
    assert found.mean == 2.5
    assert found.high - found.mean == pytest.approx(3.1824 * math.sqrt(5 / 3) / 2, rel=1e-4)


def measurement(mode, repeat, seconds, cached):
    return Measurement(
        workload="w", mode=mode, repeat=repeat, order=0, seconds=seconds, requests=4, prompt_tokens=100,
        cached_tokens=cached, new_tokens=40, ttft_ms=10.0 + repeat / 10, latency_ms=[10.0, 11.0, 12.0, 13.0],
        by_worker={0: 2, 1: 2}, computed_by_worker={0: 1, 1: 1}, prompts_sha256="", update_s=1.0, cached_after_update=0,
    )  # fmt: skip


@pytest.fixture
def findings():
    noisy = [1.0, 1.4, 0.9, 1.2, 1.1]
    return find(
        [measurement("round-robin", r, noisy[r], 20 + r % 2) for r in range(5)]
        + [measurement("kv", r, noisy[-r], 60 - r % 2) for r in range(5)],
        "round-robin",
    )


def test_only_what_the_intervals_tell_is_claimed(findings):
    told = statement(findings, "round-robin", "two workers")
    assert "cache hit rate differs by +0.3" in told
    assert "no difference was told in throughput" in told
    assert "other models, fleets and loads were not measured" in told


def test_intervals_of_differences_hold_together(findings):
    kv = next(one for one in findings if one.mode == "kv" and one.metric == "throughput")
    base = next(one for one in findings if one.mode == "round-robin" and one.metric == "throughput")
    apart = [a - b for a, b in zip(kv.values, base.values, strict=True)]
    single = interval(apart, 0.95)
    assert kv.difference.high - kv.difference.low > single.high - single.low
    assert kv.difference == interval(apart, 1 - 0.05 / len(METRICS))


def test_table_and_plot_hold_every_finding(findings):
    assert table(findings).count("\n| ") - 1 == len(findings)
    drawn = ElementTree.fromstring(plot(findings))
    assert len(drawn.findall("{*}circle")) == sum(len(finding.values) for finding in findings)
