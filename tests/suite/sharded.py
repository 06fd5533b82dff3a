"""One rank of a policy that is divided: `python -m tests.suite.sharded JOB RANK RANKS PORT OUT`, JOB a pickle.

Writes to OUT-RANK.pt what the job's actions came to.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from functional.engine.group import Rendezvous, join_store
from functional.suite.policy import Policy
from functional.suite.shards import Place, Shards

DEADLINE_S = 60.0
HOST = "127.0.0.1"


def act(policy: Policy, actions: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """What each of the policy's methods answers, one after the other; at last the whole weights."""
    found = [getattr(policy, method)(*arguments) for method, arguments in actions]
    return [*found, {name: tensor.clone() for name, tensor in policy.named_tensors()}]


def by_ranks(count: int, folder: Path, model: Path, options: dict[str, Any], actions: list[Any]) -> list[list[Any]]:
    """The same by a policy of so many ranks, each a process: what each rank has."""
    (folder / "job").write_bytes(pickle.dumps((model, options, actions)))
    meeting = Rendezvous(HOST, 0, DEADLINE_S)
    words = [sys.executable, "-m", "tests.suite.sharded", str(folder / "job")]
    ranks = [
        subprocess.Popen([*words, str(rank), str(count), str(meeting.port), str(folder / "found")])
        for rank in range(count)
    ]
    try:
        assert [rank.wait(2 * DEADLINE_S) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(count)]


def main(job: Path, rank: int, count: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    model, options, actions = pickle.loads(job.read_bytes())
    store = join_store(HOST, port, DEADLINE_S)
    shards = Shards(Place(rank, count, DEADLINE_S), torch.device("cpu"), store)
    torch.save(act(Policy(model, shards=shards, **options), actions), f"{out}-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5])
