"""The keyed hash on this GPU: held against the reference, then timed on tensors of a model's shape.

    python -m functional.suite.hash_rates --shape Qwen3-8B --out rates.json

Prints JSON. Exit status 1 where a digest is wrong. Needs a GPU with room for the model; no fleet, no network.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional.engine import nh, nh_triton
from functional.engine.proof import prove_all
from functional.suite.model import make_skeleton
from functional.suite.shapes import SHAPES
from functional.suite.vocabulary import random_models_tokenizer

SIZES = [0, 1, 3, 1023, 1024, 1025, 32767, 32768, 32769, 262144, 1_000_001, 33_554_433]
OFFSETS = [0, 1, 2, 4, 8, 16]
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool]
MEASURED = ("Qwen3-0.6B", "Qwen3-8B")
FAR = 2**31 + 2**20 + 7
"""Bytes of a tensor beyond what 32 bits address."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-sha256", action="store_true", help="leave the SHA-256 of the same tensors out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    began = time.monotonic()
    nh_triton.check(device)
    found["compile_and_check_s"] = time.monotonic() - began
    found["wrong"] = wrong_digests(device)
    found["shapes"] = [
        measure(shape, device, arguments.repeats, not arguments.no_sha256) for shape in arguments.shape or MEASURED
    ]
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 1 if found["wrong"] else 0


def wrong_digests(device: torch.device) -> list[str]:
    """What the kernel hashes otherwise than the reference: odd sizes and addresses, dtypes, joined parts, 2 GiB."""
    key = nh.Key.draw()
    base = torch.empty(max(SIZES) + max(OFFSETS), dtype=torch.uint8, device=device).random_()
    cases: dict[str, list[Tensor]] = {
        f"{size} bytes at {offset}": [base[offset : offset + size]] for size in SIZES for offset in OFFSETS
    }
    for dtype in DTYPES:
        cases[str(dtype)] = [base[: 8 * 12345].clone().view(dtype) if dtype != torch.bool else base[:999] > 7]
    cases["parts of whole blocks"] = [base[: 7 * 1024], base[3:70_000], base[:0]]
    cases["parts within a block"] = [base[:1000], base[64:4001], base[:1]]
    cases["transposed"] = [base[: 2 * 1000 * 37].view(torch.bfloat16).reshape(1000, 37).t()]
    far = torch.empty(FAR, dtype=torch.uint8, device=device).random_()
    cases |= {"beyond 2 GiB": [far], "beyond 2 GiB at 1": [far[1:]]}
    found = nh_triton.Table(list(cases.values()), device).digests(key)
    return [name for name, digest in zip(cases, found, strict=True) if digest != nh.digest(key, *cases[name])]


def measure(shape: str, device: torch.device, repeats: int, with_sha256: bool) -> dict[str, Any]:
    """Medians, in seconds, of the whole call and of its launches, beside a copy on the device of the same bytes."""
    skeleton = make_skeleton(SHAPES[shape], random_models_tokenizer(SHAPES[shape].vocab_size))
    tensors = {
        name: torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_()
        for name, parameter in skeleton.named_parameters()
    }
    parameters = [[tensor] for tensor in tensors.values()]
    nbytes = sum(tensor.numel() * 2 for tensor in tensors.values())
    key = nh.Key.draw()
    whole = median(repeats, lambda: nh_triton.Table(parameters, device).digests(key))
    row: dict[str, Any] = {
        "shape": shape,
        "tensors": len(tensors),
        "bytes": nbytes,
        "call_s": whole,
        "device_s": device_time(nh_triton.Table(parameters, device), key, repeats),
    }
    row["device_bytes_per_s"] = nbytes / row["device_s"]
    largest = max(tensors.values(), key=Tensor.numel)
    target = torch.empty_like(largest)
    copy_s = median(repeats, lambda: (target.copy_(largest), torch.cuda.synchronize()))
    row["copy_bytes_per_s"] = largest.numel() * 2 / copy_s
    if with_sha256:
        began = time.monotonic()
        prove_all(((name, [tensor]) for name, tensor in tensors.items()), None)
        row["sha256_s"] = time.monotonic() - began
    return row


def median(repeats: int, action: Callable[[], Any]) -> float:
    """Of the wall time of an action that ends synchronised; a first run does not count."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.monotonic()
        action()
        taken.append(time.monotonic() - began)
    return statistics.median(taken[1:])


def device_time(table: nh_triton.Table, key: nh.Key, repeats: int) -> float:
    """Median, by CUDA events around the launches."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        table.start(key)
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1000)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    sys.exit(main())
