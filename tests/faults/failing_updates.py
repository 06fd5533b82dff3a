"""A run beside whose rollouts updates fail: the first attempts at versions 2 and 3, with step 4's batch under way.

    python failing_updates.py RECIPE OUT RUN_DIR [key=value …]

as `functional.suite.driver`, with real engines that go on with rollouts across updates. What is made up is that a
worker refuses the cache clear of those two attempts, and that the trainer takes step 2 only once step 3's samples are
there too: so both updates meet one batch.
"""

import signal
import sys
import time
from pathlib import Path

from functional.runtime.fleet.control import ControlError, WorkerControl
from functional.suite import driver
from functional.suite.async_session import AsyncSession
from functional.suite.session import interrupt

FAILING = (2, 3)
BATCH = 4


class FailingUpdates(AsyncSession):
    def _step(self, parts, step):
        if step == FAILING[0]:
            while not self._is_generating(BATCH):
                parts.fleet.check_control_plane()
                time.sleep(0.05)
        super()._step(parts, step)

    def _is_generating(self, step):
        with self._ahead._changed:
            return step - 1 in self._ahead._finished and self._ahead._busy

    def _prepare(self, *arguments):
        parts = super()._prepare(*arguments)
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
