"""A run on however small a machine in which client processes share the rollouts, as they do where a fleet is fast:

    python spread_run.py RECIPE OUT RUN_DIR [key=value …]

as `functional.suite.driver`, with two helpers from the first batch on.
"""

import signal
import sys
from pathlib import Path

from functional.runtime.rollout.spread import SpreadClient
from functional.suite.driver import run
from functional.suite.session import Session, interrupt

HELPERS = 2


def with_helpers(prepare):
    def prepared(session, *arguments):
        parts = prepare(session, *arguments)
        assert isinstance(parts.spread, SpreadClient)
        for _ in range(HELPERS):
            parts.spread.add_helper()
        return parts

    return prepared


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    Session._prepare = with_helpers(Session._prepare)
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
