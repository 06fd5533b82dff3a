"""The check that no two engines draw the same tokens: one prompt to every worker, and what each answers."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from functional.runtime.fleet.worker import Worker
from functional.runtime.rollout.completion import Completion
from functional.suite.checklist import Checklist

CHANCE = 1e-9
"""Equal answers that come about less often than this when seeds differ are the work of one seed."""


def check_seeds(checks: Checklist, workers: Sequence[Worker], complete: Callable[[Worker], Completion]) -> None:
    """Answers may be equal only where that is likely, and how likely it is their own log-probs say.

    Judges nothing where there is one worker.
    """
    if len(workers) < 2:
        return
    answers = [(worker.index, complete(worker)) for worker in workers]
    equal = [(a, b) for a, b in combinations(answers, 2) if a[1].token_ids == b[1].token_ids]
    same = [f"workers {a[0]} and {b[0]}" for a, b in equal if math.exp(sum(a[1].logprobs)) < CHANCE]
    different = len({answer.token_ids for _, answer in answers})
    tokens = min(len(answer.token_ids) for _, answer in answers)
    if same:
        detail = f"{', '.join(same)} answer one prompt with the same tokens, which engines of two seeds hardly do"
    else:
        detail = f"{len(workers)} workers answer one prompt with {different} answers of {tokens} tokens or more"
        detail += ", the equal ones too likely to tell by" if equal else ""
    checks.add("sampling.seeds_differ", not same, detail, workers=len(workers), different=different)
