"""Print the time of a fixed computation, so that figures of different machines can be compared.

Compression and hashing of the same bytes, as for images, and plain Python, as in tests; the fastest of three.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib


def main() -> None:
    took = min(timed() for _ in range(3))
    print(f"this machine: fixed work took {took:.2f} s, {os.cpu_count()} processors")


def timed() -> float:
    started = time.perf_counter()
    data = b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() + bytes(32) for number in range(200_000))
    packed = zlib.compress(data, 1)
    for _ in range(4):
        hashlib.sha256(packed + data).digest()
    words: dict[int, int] = {}
    for number in range(600_000):
        words[number * 7919 % 65_521] = words.get(number % 65_521, 0) + number
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
