"""A trainer of several ranks (FSDP2 over gloo): `python fsdp_trainer.py MODEL RANK RANKS STORE ENGINE_RANKS` is one.

Each makes one optimizer step on data of its own. Rank 0 then sends to an engine, twice, and prints a JSON line for each
stage: the rendezvous port and the update's info, and for each update the proof.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from functional.engine.wire import Manifest, Slot
from functional.runtime.refit.gathered import GatheredWeights
from functional.runtime.refit.source import LocalWeights

DEADLINE_S = 60.0


def main(folder: Path, rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(rank)
    ids = torch.randint(0, 90, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    gathered = GatheredWeights(model.named_parameters)
    if rank == 0:
        send(model, gathered, engine_ranks=int(sys.argv[5]))
    else:
        gathered.follow()
    dist.barrier()
    dist.destroy_process_group()


def send(model: Any, gathered: GatheredWeights, engine_ranks: int) -> None:
    slots = [Slot(name, torch.bfloat16, tuple(p.shape)) for name, p in model.named_parameters()]
    source = LocalWeights(
        lambda version: slots, lambda version: gathered.weights(), None, model.config,  # type: ignore[arg-type]
        transport="gloo", device="cpu", timeout_s=DEADLINE_S, proof="sha256", resident=False,
    )  # fmt: skip
    port = source.listen("127.0.0.1")
    say({"port": port, "info": Manifest(tuple(slots), packed=True).info()})
    source.connect("127.0.0.1", port, 1 + engine_ranks)
    source.agree(1)
    for version in (1, 2):
        source.send(version)
        say({"proof": source.proof(version).as_dict(), "passes": gathered.passes})
    gathered.release()
    source.close()


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
