"""A run beside whose rollouts updates fail: the first attempts at versions 2 and 3, with step 4's batch under way.

    python failing_updates.py RECIPE OUT RUN_DIR [key=value …]

as `functional.suite.driver`, with real engines that go on with rollouts across updates. What is made up is that a
worker refuses the cache clear of those two attempts, that step 4's batch begins when update 2 is due, and that it is
asked one sample at a time until update 3: so both updates meet it.
"""

import signal
import sys
import threading
import time
from pathlib import Path

from functional.runtime.fleet.control import ControlError, WorkerControl
from functional.runtime.rollout.gate import Admission
from functional.suite import driver
from functional.suite.async_session import AsyncSession
from functional.suite.session import interrupt

FAILING = (2, 3)
BATCH = 4


class FailingUpdates(AsyncSession):
    def _keep(self, parts, step):
        if step == BATCH:
            while not self._may_begin.wait(0.05):
                self._ahead.look()
            self._limit(parts, 1)
            self._has_begun = True
        return super()._keep(parts, step)

    def _bring(self, parts, step):
        if step == FAILING[0]:
            self._may_begin.set()
            while not self._has_begun or self._gate.idle_since() is not None:
                parts.fleet.check_control_plane()
                time.sleep(0.05)
        if step == FAILING[1]:
            self._limit(parts, None)
        return super()._bring(parts, step)

    def _limit(self, parts, inflight):
        """Of what is asked from now on."""
        parts.spread._admission = Admission(self._gate, inflight)

    def _prepare(self, *arguments):
        self._may_begin, self._has_begun = threading.Event(), False
        parts = super()._prepare(*arguments)
        self._gate = parts.spread._gate
        refuse_clears(parts.refit, set(FAILING))
        return parts


def refuse_clears(refit, left):
    """Once for each of these versions, in the call that follows the proof."""
    call = WorkerControl.call

    def refusing(control, route, body=None, timeout_s=None):
        if route == "flush_cache" and refit._target in left:
            left.remove(refit._target)
            raise ControlError(f"worker {control.index}: flush_cache: injected refusal")
        return call(control, route, body, timeout_s)

    WorkerControl.call = refusing


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(driver.run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:], FailingUpdates))
