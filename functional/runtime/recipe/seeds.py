"""Each engine's seed, from the recipe's: engines that share one answer equal prompts with equal tokens."""

import hashlib

_MASK = 2**32 - 1
MOST_ENGINES = 2**16
"""Slots of a fleet, and engines that one slot may have had."""


def engine_seed(recipe_seed: int, slot: int, incarnation: int) -> int:
    """The seed of engine number `incarnation` (from 0) in `slot`: 0 to 2**32 - 1, as NumPy wants it.

    The same for the same three numbers. Under one recipe seed no two engines share one: the slot and incarnation make
    one number of 32 bits, and what follows only moves such numbers about (MurmurHash3's last step, a bijection).
    """
    if not (0 <= slot < MOST_ENGINES and 0 <= incarnation < MOST_ENGINES):
        raise ValueError(f"no seed for engine {incarnation} of slot {slot}: both go from 0 to {MOST_ENGINES - 1}")
    start = int.from_bytes(hashlib.sha256(f"engine/{recipe_seed}".encode()).digest()[:4])
    word = start ^ (slot << 16 | incarnation)
    word = (word ^ word >> 16) * 0x85EBCA6B & _MASK
    word = (word ^ word >> 13) * 0xC2B2AE35 & _MASK
    return word ^ word >> 16
