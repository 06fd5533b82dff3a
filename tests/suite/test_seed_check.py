"""`sampling.seeds_differ`: equal answers of two workers, and how likely these are."""

from dataclasses import dataclass

import pytest

from functional.suite.checklist import Checklist
from functional.suite.seeds import check_seeds


@dataclass(frozen=True)
class Worker:
    index: int


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def judged(*answers):
    checks = Checklist()
    check_seeds(checks, [Worker(index) for index in range(len(answers))], lambda worker: answers[worker.index])
    return checks.checks


UNLIKELY = Answer((1, 2, 3), (-8.0, -7.0, -9.0))
LIKELY = Answer((4, 5), (-0.1, -0.2))


def test_answers_that_differ():
    (check,) = judged(UNLIKELY, Answer((1, 2, 4), (-8.0, -7.0, -9.0)), LIKELY)
    assert check.passed
    assert "3 workers answer one prompt with 3 answers of 2 tokens or more" in check.detail


def test_equal_answers_that_are_unlikely():
    (check,) = judged(LIKELY, UNLIKELY, UNLIKELY)
    assert not check.passed
    assert "workers 1 and 2" in check.detail


def test_equal_answers_that_are_likely_tell_nothing():
    (check,) = judged(LIKELY, LIKELY)
    assert check.passed
    assert "too likely to tell" in check.detail


@pytest.mark.parametrize("answers", [(), (UNLIKELY,)])
def test_one_worker_is_not_judged(answers):
    assert judged(*answers) == []
