"""`functional serve-chat`: a recipe's fleet at its first weights, and the chat server, until told to stop.

python -m functional.suite.serve RECIPE OUT RUN_DIR [key=value …]
"""

import signal
import sys
import time
from pathlib import Path

from functional.runtime.errors import InterruptedRunError
from functional.suite import checks, driver
from functional.suite.session import Parts, Session, interrupt
from functional.suite.watching import WATCH_INTERVAL_S


class ServeSession(Session):
    """A run that serves instead of training. A worker that is lost is replaced, as in training."""

    def _train(self, parts: Parts) -> None:
        self._refit(parts, 0)
        sockets = self._sockets(parts.fleet)
        self.report.sockets = checks.check_sockets(self.checks, sockets, self._told_ports())
        assert parts.chat is not None
        self.event("chat: serving", url=parts.chat.url)
        self.say(f"serving chat at {parts.chat.url}/v1 until stopped")
        try:
            self._watch(parts)
        except InterruptedRunError as told:
            self.say(str(told))
        parts.chat.close()
        parts.fleet.flush_logs()
        self._check_join(parts)

    def _watch(self, parts: Parts) -> None:
        while True:
            parts.fleet.check_control_plane()
            if lost := parts.fleet.lost_workers():
                if len(lost) == len(parts.fleet.workers) and parts.chat is not None:
                    parts.chat.give_up("every worker was lost")
                self._refit(parts, 0, "replacement")
            time.sleep(WATCH_INTERVAL_S)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(driver.run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:], ServeSession))
