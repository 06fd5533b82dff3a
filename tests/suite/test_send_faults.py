"""Faults of a send, as the proof has to see them: each changes what is expected, and nothing else."""

import pytest

torch = pytest.importorskip("torch")

from functional.runtime.errors import RefitError  # noqa: E402
from functional.runtime.refit.source import LocalWeights  # noqa: E402
from functional.suite.send_faults import SendFault, tampered  # noqa: E402


def named():
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 2), "k": (2, 2), "v": (2, 2), "norm": (4,)}
    return [(n, torch.randn(s, generator=generator).to(torch.bfloat16)) for n, s in shapes.items()]


def sent(kind, after=0):
    return list(tampered(named(), SendFault(kind, after)))


def test_swap_exchanges_two_of_equal_shape():
    clean, faulty = dict(named()), dict(sent("swap"))
    assert torch.equal(faulty["k"], clean["v"])
    assert torch.equal(faulty["v"], clean["k"])
    assert torch.equal(faulty["q"], clean["q"])


def test_flip_changes_one_bit():
    clean, faulty = dict(named()), dict(sent("flip", 1))
    difference = clean["k"].view(torch.int16) ^ faulty["k"].view(torch.int16)
    assert difference.count_nonzero() == 1
    assert difference.sum() == 1


def test_skip_and_twice():
    assert [name for name, _ in sent("skip", 2)] == ["q", "k", "norm"]
    assert [name for name, _ in sent("twice", 3)] == ["q", "k", "v", "norm", "norm"]


def test_local_weights_names_what_it_sends_and_refuses_a_version_it_does_not_hold():
    def weights(version):
        if version != 7:
            raise RefitError(f"no version {version}")
        return iter(named())

    source = LocalWeights(weights, None, None, transport="gloo", device="cpu", timeout_s=1)
    source.select(7)
    info = source.update_info()
    assert info["names"] == ["q", "k", "v", "norm"]
    assert info["total_bytes"] == 2 * (8 + 4 + 4 + 4)
    with pytest.raises(RefitError, match="no version 8"):
        source.select(8)
    with pytest.raises(RefitError, match="call listen first"):
        source.send()
