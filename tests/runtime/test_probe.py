"""What a probe tells, by simulation: noise of several shapes and sizes, shifts from none to far above it."""

import math
import random
from statistics import fmean as mean

import pytest

from functional.runtime.refit.probe import (
    FALSE_ALARMS,
    MAX_ROUNDS,
    TOKENS,
    Finding,
    Noise,
    Sighting,
    judge,
    other_z,
    probe_prompt,
    read,
)

SHAPES = {
    "normal": lambda rng: rng.gauss(0, 1),
    "heavy tails": lambda rng: rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3),  # Student's t, 3 degrees
    "tokens of unlike scale": lambda rng: rng.gauss(0, 1) * math.exp(1.2 * rng.gauss(0, 1)),
}
TRIALS = 1000


def findings(shape, noise_size, shift, has_new, trials=TRIALS, workers=1):
    """Findings of probes whose true log-probs under the versions differ by `shift` times the mean distance between
    engine and trainer; each of the three computes with noise of its own."""
    rng, draw = random.Random(f"{shape}/{noise_size}/{shift}/{has_new}"), SHAPES[shape]
    distances = [noise_size * abs(draw(rng) - draw(rng)) for _ in range(4000)]
    move = shift * mean(distances) / mean([abs(draw(rng)) for _ in range(4000)])
    noise = Noise()
    noise.learn(Sighting(distance, 0.0, None) for distance in distances)

    def sight():
        new, other = -5.0, -5.0 + move * draw(rng)
        by_engine, by_new, by_other = (noise_size * draw(rng) for _ in range(3))
        return Sighting((new if has_new else other) + by_engine, new + by_new, other + by_other)

    def sight_round(_number):
        return [sight() for _ in range(TOKENS)]

    return [judge(sight_round(0), sight_round, noise, workers)[0].finding for _ in range(trials)]


@pytest.mark.parametrize("noise_size", [0.0005, 0.05])
@pytest.mark.parametrize("shape", SHAPES)
def test_old_weights_are_caught_from_four_times_the_noise(shape, noise_size):
    for shift in (4, 30):
        found = findings(shape, noise_size, shift, has_new=False)
        assert found.count(Finding.OTHER) >= 0.98 * TRIALS


@pytest.mark.parametrize("shift", [0, 0.5, 1, 2, 4, 30])
@pytest.mark.parametrize("shape", SHAPES)
def test_new_weights_raise_no_alarm_at_any_shift(shape, shift):
    assert findings(shape, 0.05, shift, has_new=True).count(Finding.OTHER) <= 0.002 * TRIALS


@pytest.mark.parametrize("workers", [1, 2, 256])
def test_all_rounds_of_all_workers_together_keep_the_promise(workers):
    assert workers * MAX_ROUNDS * math.exp(-(other_z(workers) ** 2) / 2) == pytest.approx(FALSE_ALARMS)


def test_old_weights_on_one_of_many_workers_are_caught():
    found = findings("heavy tails", 0.05, 4, has_new=False, trials=500, workers=256)
    assert found.count(Finding.OTHER) >= 0.98 * 500


def test_versions_that_are_alike_cannot_be_told_and_cost_few_tokens():
    noise = Noise()
    noise.learn([Sighting(0.05, 0.0, None)] * TOKENS)
    rng = random.Random(0)
    asked = 0

    def sight():
        return Sighting(rng.gauss(-5, 0.05), rng.gauss(-5, 0.05), rng.gauss(-5, 0.05))

    def more(number):
        nonlocal asked
        asked += 1
        return [sight() for _ in range(TOKENS)]

    found = [judge([sight() for _ in range(TOKENS)], more, noise, workers=1)[0].finding for _ in range(500)]
    assert found.count(Finding.UNCLEAR) > 490
    assert asked < 1000


def test_an_engine_far_from_both_versions_fits_neither():
    noise = Noise()
    noise.learn([Sighting(-1.0 + 0.01 * i, -1.0, None) for i in range(8)])
    assert read([Sighting(-3.0, -1.0, -5.0)] * TOKENS, noise).finding is Finding.NEITHER
    assert read([Sighting(-1.05, -1.0, -5.0)] * TOKENS, noise).finding is Finding.NEW


def test_where_engine_and_trainer_agree_to_the_last_bit_a_rounding_is_not_far():
    noise = Noise()
    noise.learn([Sighting(-1.0, -1.0, None)] * TOKENS)
    assert noise.median == 0
    assert read([Sighting(-1.001, -1.0, -1.3)] * TOKENS, noise).finding is Finding.NEW
    assert read([Sighting(-1.0, -1.0, -1.0)] * TOKENS, noise).finding is Finding.UNCLEAR


def test_a_first_version_is_only_learnt_from():
    assert read([Sighting(-1.0, -1.1, None)] * TOKENS, Noise()).finding is Finding.FIRST


def test_noise_is_that_of_the_latest_tokens():
    noise = Noise(kept=4)
    noise.learn([Sighting(1.0, 0.0, None)] * 4)
    noise.learn([Sighting(0.25, 0.0, None)] * 3)
    assert noise.median == 0.25


def test_prompts_are_fixed_within_the_vocabulary_and_never_shared_between_rounds():
    rounds = [probe_prompt(number, 128, 33) for number in range(MAX_ROUNDS)]
    assert rounds == [probe_prompt(number, 128, 33) for number in range(MAX_ROUNDS)]
    assert len({prompt[:16] for prompt in rounds}) == MAX_ROUNDS
    assert all(len(prompt) == 33 and min(prompt) >= 0 and max(prompt) < 128 for prompt in rounds)
