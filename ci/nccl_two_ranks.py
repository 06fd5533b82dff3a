"""Two NCCL ranks on the first GPU, joined by NeMo RL's own process group: whether a broadcast comes through.

    NCCL_MULTI_RANK_GPU_ENABLE=1 python ci/nccl_two_ranks.py

Run by NeMo RL's Python with its tree on the path. Prints the NCCL version and the rate; exit status 0 when it did.
"""

import socket
import sys
import time
from multiprocessing import get_context

WORDS = 64 * 2**20


def rank(number: int, port: int) -> None:
    """Rank 0 sends ones, rank 1 receives them over zeros; raises unless all arrive."""
    import torch
    from nemo_rl.distributed.stateless_process_group import StatelessProcessGroup  # type: ignore[import-not-found]

    torch.cuda.set_device(0)
    group = StatelessProcessGroup("127.0.0.1", port, number, 2)
    group.init_nccl_communicator(device=0)
    data = torch.ones(WORDS, device=0) if number == 0 else torch.zeros(WORDS, device=0)
    began = time.monotonic()
    group.broadcast(data, 0)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    if not bool((data == 1).all()):
        raise SystemExit(f"rank {number}: not all arrived")
    if number == 0:
        print(f"two ranks on {torch.cuda.get_device_name(0)}: {WORDS * 4 / seconds / 1e9:.1f} GB/s", flush=True)


def main() -> int:
    """Run both; returns 0 when both end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    processes = [context.Process(target=rank, args=(number, port)) for number in (0, 1)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            break  # the other one waits for it
        time.sleep(0.1)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return 0 if all(process.exitcode == 0 for process in processes) else 1


if __name__ == "__main__":
    sys.exit(main())
