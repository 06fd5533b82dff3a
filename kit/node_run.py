"""`./build.py run` for machines with Python ≥ 3.11 and none of the kit's packages, such as the nodes of a cluster.

python3 -m kit.node_run --sqsh FILE [--mount SRC:DST[:ro]]… [--env NAME[=value]]… -- COMMAND…
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kit.errors import KitError
from kit.run import make_container, run_container


def main() -> int:
    parser = argparse.ArgumentParser(prog="kit.node_run", allow_abbrev=False)
    parser.add_argument("--sqsh", type=Path, required=True)
    parser.add_argument("--mount", action="append", default=[])
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    try:
        container = make_container(given.sqsh, given.command, given.mount, given.env, "host")
        return run_container(container, "own").status
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
