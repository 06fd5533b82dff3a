"""The keyed hash: known answers of its definition in plain integers, and what must change a digest."""

import os

import pytest
import torch

from functional.engine import nh
from functional.engine.nh import BLOCK_BYTES, KEY_WORDS, LANES, Key, P, digest

KNOWN = Key(
    tuple(0x9E3779B9 * (i + 1) % 2**32 for i in range(KEY_WORDS)),
    tuple(0x85EBCA6B * (i + 7) % 2**32 for i in range(KEY_WORDS)),
    tuple(0x1B873593_CC9E2D51 * (i + 3) % P for i in range(LANES)),
)


def by_definition(key: Key, data: bytes) -> str:
    """The definition, word by word."""
    data += bytes(-len(data) % BLOCK_BYTES)
    lanes = []
    for lane in range(LANES):
        total = 0
        for b in range(len(data) // BLOCK_BYTES):
            block = data[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]
            m = [int.from_bytes(block[4 * i : 4 * i + 4], "little") for i in range(256)]
            value = 0
            for i in range(128):
                left = (m[i] + key.first[i + 4 * lane]) % 2**32
                right = (m[i + 128] + key.second[i + 4 * lane]) % 2**32
                value = (value + left * right) % 2**64
            total = (total + value * pow(key.points[lane], b + 1, P)) % P
        lanes.append(total)
    return "".join(f"{lane:016x}" for lane in lanes)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def test_known_answers() -> None:
    assert digest(KNOWN, tensor(b"")) == "0" * 64
    assert digest(KNOWN, tensor(b"abc")) == "19ab460601108445104cb8971a75e3eb0216485e6e2f87d3186aa9b2146a0331"
    long = "0b347676948db8921888e292582cbeb11364d8cbf3153dff1fa15a5a46cf4266"
    assert digest(KNOWN, tensor(bytes(range(256)) * 12 + b"tail")) == long


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1023, 1024, 1025, 5000, 70_001])
def test_the_reference_follows_the_definition(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, slab in ((KNOWN, 2), (Key.draw(), 16), (Key.draw(), 4096)):
        monkeypatch.setattr(nh, "_SLAB_BLOCKS", slab)
        for data in (os.urandom(size), b"\xff" * size):
            assert digest(key, tensor(data)) == by_definition(key, data)


def test_the_extremes_wrap_and_reduce() -> None:
    highest = Key((2**32 - 1,) * KEY_WORDS, (2**32 - 1,) * KEY_WORDS, (P - 1,) * LANES)
    for data in (bytes(3000), b"\xff" * 3000, b"\x01" * 3000):
        assert digest(highest, tensor(data)) == by_definition(highest, data)
    zero = Key((0,) * KEY_WORDS, (0,) * KEY_WORDS, (1,) * LANES)
    assert digest(zero, tensor(b"\xff" * BLOCK_BYTES)) == by_definition(zero, b"\xff" * BLOCK_BYTES)


def test_parts_are_hashed_as_what_they_make_when_joined() -> None:
    whole = torch.randn(300, 7)
    assert digest(KNOWN, whole[:11], whole[11:200], whole[200:]) == digest(KNOWN, whole)
    assert digest(KNOWN, whole.t()) == digest(KNOWN, whole.t().contiguous())


def test_every_bit_and_the_order_of_blocks_count() -> None:
    key, data = Key.draw(), os.urandom(2 * BLOCK_BYTES + 5)
    right = digest(key, tensor(data))
    seen = {right}
    for bit in [*range(0, 8 * len(data), 61), 8 * len(data) - 1]:
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        seen.add(digest(key, tensor(bytes(wrong))))
    assert len(seen) == len(range(0, 8 * len(data), 61)) + 2
    swapped = data[BLOCK_BYTES : 2 * BLOCK_BYTES] + data[:BLOCK_BYTES] + data[2 * BLOCK_BYTES :]
    halves = data[BLOCK_BYTES // 2 : BLOCK_BYTES] + data[: BLOCK_BYTES // 2] + data[BLOCK_BYTES:]
    assert len({right, digest(key, tensor(swapped)), digest(key, tensor(halves))}) == 3
    for lane in range(LANES):
        part = slice(16 * lane, 16 * lane + 16)
        assert digest(key, tensor(swapped))[part] != right[part], "each lane tells it by itself"


def test_lanes_are_four_hashes_of_their_own() -> None:
    value = digest(Key.draw(), tensor(os.urandom(BLOCK_BYTES)))
    assert len({value[16 * lane : 16 * lane + 16] for lane in range(LANES)}) == LANES


def test_keys_are_drawn_anew_within_their_bounds_and_travel_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Key.draw(), Key.draw()
    assert first != second
    assert len(first.first) == len(first.second) == 140
    assert len({*first.first, *first.second}) > 270, "no array repeats the other"
    assert Key.parse(first.hex()) == first
    for text in (first.hex()[:-2], first.hex() + "00", first.hex()[:-16] + P.to_bytes(8, "little").hex(), "", "xyz"):
        with pytest.raises(ValueError, match=r"key|hex"):
            Key.parse(text)
    drawn = iter([b"\xff" * 8, P.to_bytes(8, "little"), b"\x05" + bytes(7)])
    monkeypatch.setattr(os, "urandom", lambda size: next(drawn))
    assert nh._draw_point() == 5, "p itself is drawn again"
