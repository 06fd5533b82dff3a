"""The kernel against the reference: on CPU through Triton's interpreter, on a GPU where there is one."""

import os
import subprocess
import sys

import pytest
import torch

ON_GPU = torch.cuda.is_available()
SIZES = [0, 1, 2, 3, 5, 1023, 1024, 1025, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 300_001]


def test_the_kernel_gives_the_digests_of_the_reference() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, **({} if ON_GPU else {"TRITON_INTERPRET": "1"})}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{len(SIZES) * 3 + 5} digests" in done.stdout


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_offsets_beyond_two_gigabytes() -> None:
    from functional.engine import nh, nh_triton

    device = torch.device("cuda")
    data = torch.empty(2**31 + 2**20 + 7, dtype=torch.uint8, device=device).random_()
    table = nh_triton.Table([[data], [data[1:]]], device)
    for key in (nh.Key.draw(), nh.Key.draw()):
        right = table.digests(key)
        assert right == [nh.digest(key, data), nh.digest(key, data[1:])]
    data[-1] ^= 1
    assert not {*table.digests(key)} & {*right}


def compare() -> None:
    from functional.engine import nh, nh_triton

    device = torch.device("cuda" if ON_GPU else "cpu")
    key = nh.Key.draw()
    base = torch.randint(0, 256, (400_000,), dtype=torch.uint8, device=device)
    base[1000:5000] = 255
    parameters = [[base[offset : offset + size]] for offset in (0, 1, 16) for size in SIZES]
    parameters += [
        [base[:2048], base[7:5000]],  # whole blocks, then bytes at an odd address
        [base[:2000], base[16:5000], base[:1]],  # parts that end within a block
        [base[:0], base[:3072], base[:0]],
        [base[: 2 * 777 * 3].view(torch.bfloat16).reshape(777, 3).t()],
        [torch.tensor(1.5, device=device)],
    ]
    found = nh_triton.Table(parameters, device).digests(key)
    assert found == [nh.digest(key, *parts) for parts in parameters]
    nh_triton.check(device)
    print(len(found), "digests")


if __name__ == "__main__":
    compare()
