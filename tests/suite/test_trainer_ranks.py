"""A trainer of two ranks as Ray actors: what its first rank hands out, and what becomes of a rank that is lost."""

import os
import signal

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from functional.runtime.errors import ProcessDiedError
from functional.runtime.refit.parts import SourceLostError
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.trainer import RemoteWeights, TrainerRanks
from tests.suite.test_policy import SAMPLES
from tests.suite.test_shards import compare_weights, samples

DEADLINE_S = 20


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def trainer(cluster, load):
    """Of as many ranks as are asked for."""
    made = []

    def trainer(ranks):
        key = f"G.dynamo_cfg.control_timeout_s={DEADLINE_S}"
        recipe = load(f"cluster.gpus_per_node={4 + ranks}", key, "policy.optimizer.lr=0.001")
        assert recipe.trainer_ranks == ranks
        made.append(TrainerRanks(recipe, ARITHMETIC_DIR, None, {}, 0))
        ray.get(made[-1].first.ready.remote(), timeout=120)
        return made[-1]

    yield trainer
    for ranks in made:
        ranks.close()


def ask(ranks, method, *arguments):
    return ray.get(getattr(ranks.first, method).remote(*arguments), timeout=4 * DEADLINE_S)


def tensors(ranks, version, most=None):
    """What the weight source is given, up to so many."""

    def taken(trainer):
        class Source:
            def take(self):
                named = trainer._tensors(version)
                return {name: tensor.clone() for _, (name, tensor) in zip(range(most or 10**6), named, strict=False)}

        weights, trainer._weights = trainer._weights, Source()
        try:
            return trainer.weights("take")
        finally:
            trainer._weights = weights

    return ray.get(ranks.first.__ray_call__.remote(taken), timeout=60)


def test_two_ranks_hand_out_what_one_does_gathered_once(trainer):
    two, one = trainer(2), trainer(1)
    batch = samples(*SAMPLES)
    start = tensors(one, 0)
    layouts = [[(s.name, s.dtype, s.shape) for s in ask(t, "weights", "metadata", 0).slots] for t in (two, one)]
    assert layouts[0] == layouts[1]
    before = tensors(two, 0)
    assert list(before) == [name for name, *_ in layouts[0]]
    assert all(torch.equal(before[name], start[name]) for name in start)
    assert ask(two, "passes") == 1
    prompt = [5, 17, 3, 40, 2, 9]
    for ranks in (two, one):
        ask(ranks, "foresee", prompt)
        ask(ranks, "keep")
    metrics = ask(two, "train", batch, 1)
    assert metrics["loss"] == pytest.approx(ask(one, "train", batch, 1)["loss"], abs=0.01)
    assert ask(two, "passes") == 1, "a step gathers no weights to be sent"
    assert len(tensors(two, 1, most=2)) == 2, "a pass that is left early"
    moved, wanted = tensors(two, 1), tensors(one, 1)
    compare_weights(moved, wanted, start)
    assert ask(two, "passes") == 3
    kept = tensors(two, 0)
    assert all(torch.equal(kept[name], start[name]) for name in start), "the version before, from the snapshot"
    ask(two, "go_back", 0)
    back = tensors(two, 0)
    assert all(torch.equal(back[name], start[name]) for name in start)
    with pytest.raises(RayTaskError, match="holds no weights of policy version 1"):
        tensors(two, 1)
    assert set(two.pids()) == {"trainer-0", "trainer-1"}


def test_a_rank_that_is_killed_is_named(trainer):
    ranks = trainer(2)
    ranks.check()
    weights = RemoteWeights(ranks.first, DEADLINE_S, ranks.check)
    os.kill(ranks.pids()["trainer-1"][0], signal.SIGKILL)
    with pytest.raises(RayTaskError, match="trainer rank 1 of 2: its process is gone"):
        ask(ranks, "train", samples(*SAMPLES), 1)
    with pytest.raises(ProcessDiedError, match=r"^trainer rank 1 of 2: its process is gone"):
        ranks.check()
    with pytest.raises(SourceLostError, match="trainer rank 1 of 2: its process is gone"):
        weights.proof(0)


def test_a_rank_that_is_stopped_is_named_at_the_deadline(trainer):
    ranks = trainer(2)
    pid = ranks.pids()["trainer-1"][0]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RayTaskError, match="trainer rank 1 of 2 has not answered within"):
            ask(ranks, "train", samples(*SAMPLES), 1)
    finally:
        os.kill(pid, signal.SIGCONT)
