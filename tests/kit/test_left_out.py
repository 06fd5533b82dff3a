"""docker/left-out.txt: every line of it names something in the wheels, and none of that is in the image."""

from __future__ import annotations

import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from kit.container_init import Mount
from kit.layout import REPO, release
from kit.run import Container, run_container

pytestmark = pytest.mark.image


def patterns() -> list[str]:
    lines = (REPO / "docker/left-out.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_each_pattern_names_something_in_the_wheels() -> None:
    """All of them in the cuda wheels, where these are fetched; else folders of tests in the cpu wheels."""
    inputs = REPO / "dist/inputs"
    cuda = list(inputs.glob("cuda*/wheels/*.whl"))
    names = {name for wheel in cuda or inputs.glob("cpu/wheels/*.whl") for name in zipfile.ZipFile(wheel).namelist()}
    folders = {str(parent) for name in names for parent in Path(name).parents} | names
    for pattern in patterns():
        if cuda or (pattern.endswith("tests") and pattern.partition("/")[0] in folders):
            assert any(fnmatchcase(folder, pattern) for folder in folders), pattern


def test_none_of_it_is_in_the_image(tmp_path: Path) -> None:
    made = release("cpu")
    tests = " -o ".join(f"-path '*/site-packages/{pattern}'" for pattern in patterns())
    script = (
        f"find /opt/*_venv/lib \\( {tests} \\) >/out/found; find /opt/trainer_venv -name '*.so' | head -1 >/out/seen"
    )
    mount = Mount(source=str(tmp_path), target="/out", read_only=False)
    assert run_container(Container(made.sqsh, ["sh", "-c", script], [mount]), "own").status == 0
    assert (tmp_path / "seen").read_text() != ""
    assert (tmp_path / "found").read_text() == ""
