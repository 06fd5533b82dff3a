"""The trainer's end as a process of its own, so that it can be killed: `python sending.py MODEL PLAN_JSON`.

Prints the rendezvous port, then (after `send`) a JSON line with what became of the transfer.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from functional.engine.errors import TransferError
from functional.engine.wire import Manifest
from functional.runtime.refit.source import Sender

SMALL_CHUNKS = 20_000


def named_tensors(model: Path, change: list[str]) -> list[tuple[str, Tensor]]:
    """Checkpoint tensors, with one thing wrong when `change` asks for it."""
    tensors = dict(sorted(load_file(model / "model.safetensors").items()))
    kind, names = (change[0], change[1:]) if change else ("", [])
    if kind == "flip":
        tensors[names[0]].view(torch.uint8).view(-1)[-1] ^= 1
    elif kind == "swap":
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    elif kind == "skip":
        del tensors[names[0]]
    listed = list(tensors.items())
    if kind == "twice":
        listed.append((names[0], tensors[names[0]]))
    return listed


def main(model: Path, plan: dict[str, Any]) -> None:
    named = named_tensors(model, plan.get("change", []))
    manifest = Manifest.of(named, packed=plan["packed"], buffer_bytes=SMALL_CHUNKS)
    sender = Sender(plan["transport"], plan["device"], plan["timeout_s"])
    print(json.dumps({"port": sender.listen("127.0.0.1"), "info": manifest.info()}), flush=True)
    try:
        sender.connect("127.0.0.1", 0, plan.get("world_size", 2))
        sender.send(_until(named, plan), manifest)
        print(json.dumps({"sent": True}), flush=True)
    except TransferError as error:
        print(json.dumps({"sent": False, "kind": type(error).__name__, "error": str(error)}), flush=True)
    sender.close()


def _until(named: list[tuple[str, Tensor]], plan: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for index, item in enumerate(named):
        if index == plan.get("after"):
            os.kill(os.getpid(), signal.Signals[plan["signal"]])
        yield item


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
