"""The list of patches: what it says of each, and that none is left out. Needs no vLLM; that they are applied is seen in
the log of a real engine, and in build.json of the image."""

from pathlib import Path

from functional.engine import patches
from functional.engine.patches import PATCHES

ENGINE = Path(patches.__file__).parent


def test_every_patch_is_listed_once():
    modules = [patch.module.__name__.rpartition(".")[2] for patch in PATCHES]
    assert sorted(modules) == sorted(path.stem for path in ENGINE.glob("*_patch.py"))
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


def test_each_applies_to_the_locked_version_only():
    for patch in PATCHES:
        assert patch.applies_to("0.23.0")
        assert patch.applies_to("0.23.0+cpu")
        assert not patch.applies_to("0.23.1")
        assert patch.describe("0.23.1")["applies"] is False


def test_where_each_is_in_force(monkeypatch):
    patches_of = {patch.where: patch for patch in PATCHES if patch.where}
    assert len(patches_of) == 3
    assert all(patch.is_for_here("0.23.0") for patch in PATCHES if patch.where is None)
    for variable in ("VLLM_RENDEZVOUS_DIR", "VLLM_RANK_DEVICES"):
        (patch,) = [patch for where, patch in patches_of.items() if where.startswith(variable)]
        monkeypatch.delenv(variable, raising=False)
        assert not patch.is_for_here("0.23.0")
        monkeypatch.setenv(variable, "0,0")
        assert patch.is_for_here("0.23.0")
        assert not patch.is_for_here("0.23.1")
