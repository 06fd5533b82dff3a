"""Rollouts ahead of training: real threads, with a service of rollouts that answers as it is told."""

import threading
import time

import pytest

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.completion import Completion
from functional.suite.ahead import Ahead, StoppedError

PATIENCE_S = 10


def nothing_wrong():
    pass


class Service:
    """Answers for a step at the fleet's version once `release` was called for it, or at once."""

    def __init__(self, steps, bound, held=()):
        self.version = 0
        self.begun, self.failing = [], None
        self.releases = {step: threading.Event() for step in held}
        self.ahead = Ahead(self.generate, lambda: self.version, range(1, steps + 1), bound)

    def generate(self, step):
        self.begun.append((step, self.version))
        version = self.version
        if step in self.releases:
            while not self.releases[step].wait(0.01):
                self.ahead.look()
        if self.failing == step:
            raise RolloutError(f"step {step} cannot be had")
        return [sample(version)]

    def update(self, version):
        self.version = version
        self.ahead.notice()

    def settled(self, *begun):
        """Wait until generation began as told, and see that it goes no further."""
        deadline = time.monotonic() + PATIENCE_S
        while self.begun[: len(begun)] != list(begun) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert self.begun == list(begun)

    def __enter__(self):
        self.ahead.start()
        return self

    def __exit__(self, *_):
        for event in self.releases.values():
            event.set()
        self.ahead.stop(PATIENCE_S)


def sample(version):
    return Completion("r", (1,), (1,), (-1.0,), 1, 0, None, 0.0, 0.0, None, policy_version=version)


@pytest.mark.parametrize("bound", [1, 3])
def test_generation_goes_as_far_ahead_as_the_bound_and_on_with_each_update(bound):
    with Service(steps=9, bound=bound) as service:
        begun = [(step, 0) for step in range(1, bound + 2)]
        service.settled(*begun)
        for step in range(1, 5):
            (taken,) = service.ahead.take(step, step - 1, nothing_wrong)
            assert 0 <= step - 1 - taken.policy_version <= bound
            service.settled(*begun)  # training alone lets nothing begin
            service.update(step)
            begun.append((step + bound + 1, step))
            service.settled(*begun)


def test_generation_for_the_next_step_goes_on_while_the_trainer_has_this_one():
    with Service(steps=4, bound=1, held=(2,)) as service:
        service.ahead.take(1, 0, nothing_wrong)
        service.settled((1, 0), (2, 0))
        assert service.ahead.finished() == []
        service.releases[2].set()
        assert len(service.ahead.take(2, 1, nothing_wrong)) == 1


def test_a_trainer_whose_updates_failed_is_not_kept_waiting():
    """Steps 1 to 3 were taken, and no update reached the fleet: 0 is what both have."""
    with Service(steps=5, bound=1) as service:
        for step in range(1, 5):
            (taken,) = service.ahead.take(step, 0, nothing_wrong)
            assert taken.policy_version == 0


def test_a_sample_beyond_the_bound_is_refused():
    with Service(steps=4, bound=1) as service:
        service.settled((1, 0), (2, 0))
        service.ahead.take(1, 0, nothing_wrong)
        with pytest.raises(RolloutError, match=r"policy version 0, and the trainer has 2: more than 1 apart"):
            service.ahead.take(2, 2, nothing_wrong)


def test_what_generation_ends_with_ends_the_wait_for_it():
    service = Service(steps=4, bound=1)
    service.failing = 2
    with service:
        service.ahead.take(1, 0, nothing_wrong)
        with pytest.raises(RolloutError, match="step 2 cannot be had"):
            service.ahead.take(2, 1, nothing_wrong)


def test_what_the_fleet_ends_with_ends_the_wait():
    def etcd_is_gone():
        raise RolloutError("etcd ended")

    with Service(steps=4, bound=1, held=(1,)) as service, pytest.raises(RolloutError, match="etcd ended"):
        service.ahead.take(1, 0, etcd_is_gone)


def test_nothing_is_under_way_while_it_is_held():
    with Service(steps=3, bound=2, held=(1,)) as service:
        service.settled((1, 0))
        inside = threading.Event()

        def hold():
            with service.ahead.held(lambda: None):
                inside.set()
                time.sleep(0.3)

        holding = threading.Thread(target=hold)
        holding.start()
        assert not inside.wait(0.1), "held while a step was under way"
        service.releases[1].set()
        assert inside.wait(PATIENCE_S)
        service.settled((1, 0))
        holding.join()
        service.settled((1, 0), (2, 0), (3, 0))


def test_it_ends_with_what_it_has_under_way():
    with Service(steps=4, bound=1, held=(1,)) as service:
        service.settled((1, 0))
        service.ahead.stop(PATIENCE_S)
        assert [thread for thread in threading.enumerate() if thread.name == "rollouts ahead"] == []
        with pytest.raises(StoppedError):
            service.ahead.look()


def test_a_thread_that_does_not_end_is_told_of():
    service = Service(steps=1, bound=1)
    stuck = threading.Event()
    service.ahead._generate = lambda step: stuck.wait(PATIENCE_S)
    service.ahead.start()
    try:
        with pytest.raises(Exception, match="still there"):
            service.ahead.stop(0.1)
    finally:
        stuck.set()
