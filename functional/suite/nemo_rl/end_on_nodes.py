"""Find what a run left on the nodes of a Ray cluster that was there before it, and end it: run by NeMo RL's own Python,
whose Ray the cluster's is.

    python end_on_nodes.py VARIABLE=VALUE SECONDS ANSWER_FILE

The run's processes are those that have this variable, which Ray hands on to its actors and they to what they start.
They have SECONDS to end by themselves. The answer: {address of a node: [a line for each that had to be killed]}.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

ANSWER_S = 60.0


def main(variable: str, seconds: float, answer: str) -> None:
    """Ask each node of the cluster that RAY_ADDRESS names, and write the file `answer`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    on_node = ray.remote(num_cpus=0, max_retries=0)(end_all)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[node["NodeManagerAddress"]] = on_node.options(scheduling_strategy=here).remote(variable, seconds)
    found = dict(zip(asked, ray.get(list(asked.values()), timeout=seconds + ANSWER_S), strict=True))
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def end_all(variable: str, seconds: float) -> list[str]:
    """Kill the processes of this node that have the variable and did not end within `seconds`; name them."""
    deadline = time.monotonic() + seconds
    while (found := processes_with(variable)) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = []
    for pid, command in found.items():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            lines.append(f"process {pid}: {command[:120]}")
    return lines


def processes_with(variable: str) -> dict[int, str]:
    """Process ID → command line. Other users' processes cannot be read, and are none of the run's."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = words.decode(errors="replace").strip()
    return found


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
