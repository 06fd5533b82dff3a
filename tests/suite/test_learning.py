"""Slopes of rewards and the verdict on them."""

import random

import pytest

from functional.suite.learning import describe, judge, main, plot, slope
from tests.recipes import RECIPES


def curve(gain, seed, steps=30, noise=0.005):
    random_ = random.Random(seed)
    return [0.5 + gain * step + random_.gauss(0, noise) for step in range(steps)]


def learning(trained, withheld):
    return judge(
        {
            "trained": {seed: curve(trained, seed) for seed in range(3)},
            "withheld": {seed: curve(withheld, seed + 3) for seed in range(3)},
        }
    )


def test_slope_of_a_line():
    assert slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx(2)
    assert slope([3.0, 1.0, 3.0]) == pytest.approx(0)


def test_interval_by_hand():
    """Slopes 1, 2 and 3: mean 2, deviation 1, t of two degrees of freedom 4.3027."""
    found = judge({"trained": {s: [0.0, float(s)] for s in (1, 2, 3)}, "withheld": {s: [0.0, 0.0] for s in (1, 2, 3)}})
    assert found.slopes["trained"] == [1, 2, 3]
    assert (found.trained.low, found.trained.high) == pytest.approx(
        (2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-3
    )
    assert not found.learns
    assert found.stays


@pytest.mark.parametrize(
    ("trained", "withheld", "learns", "stays"),
    [
        (0.01, 0.0, True, True),
        (0.0, 0.0, False, False),  # nothing is within a fifth of nothing
        (-0.01, 0.0, False, False),
        (0.01, 0.01, True, False),  # it rises without updates
        (0.01, -0.01, True, False),
    ],
)
def test_verdict(trained, withheld, learns, stays):
    found = learning(trained, withheld)
    assert (found.learns, found.stays) == (learns, stays)
    assert "wanted within" in describe(found)


def test_the_plot_has_a_line_a_run():
    drawn = plot(learning(0.01, 0.0))
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert drawn.count('class="line') == 6


@pytest.mark.parametrize(
    ("recipe", "override", "complaint"),
    [
        ("grpo_cpu.yaml", "grpo.async_grpo.enabled=true", "grpo.async_grpo.enabled=True: courses generate and train"),
        ("grpo_cpu.yaml", "grpo.max_num_steps=1", "grpo.max_num_steps=1: a slope needs 2 steps at least"),
        ("agent_cpu.yaml", "grpo.max_num_steps=2", "data.dataset_name='tool_arithmetic': conversations"),
    ],
)
def test_what_it_would_not_do_is_refused_before_anything_starts(tmp_path, capsys, recipe, override, complaint):
    pytest.importorskip("ray")
    assert main([str(RECIPES / recipe), str(tmp_path / "out"), str(tmp_path), override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{recipe}: {complaint}" in line
    assert not (tmp_path / "out").exists()
