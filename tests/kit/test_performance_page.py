"""docs/performance.md: sections replace themselves and leave the others; a refit's section says what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import refit
from bench.page import put_section

pytestmark = pytest.mark.unit


def test_a_section_takes_the_place_of_its_last_one_alone(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    put_section(page, "refit", "one\n")
    put_section(page, "refit-scale", "scale")
    page.write_text(page.read_text() + "\nby hand\n")
    put_section(page, "refit", "two")
    text = page.read_text()
    assert text.startswith("# Performance\n")
    assert "one" not in text
    assert text.index("two") < text.index("scale") < text.index("by hand")
    page.write_text(text.replace("<!-- refit: end -->", ""))
    with pytest.raises(ValueError, match="has no «<!-- refit: end -->»"):
        put_section(page, "refit", "three")


def result(device: str, parameters: int, total: float) -> dict[str, Any]:
    about = {"parameters": parameters, "bytes": 2 * parameters, "device": device, "shared": False, "workers": 1}
    update = {"warm probe": 0.01, "transfer": total / 2, "prove": total / 4, "shut": total - 0.01, "total": total}
    return {
        "about": {**about, "proof": "nh"},
        "rows": {
            "update": [update] * 3,
            "protocol": [{"total": total / 2}] * 3,
            "broadcast": [{"total": total / 4}] * 3,
        },
    }


def test_results_of_other_machines_join_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in (("a", result("NVIDIA H200", 8_000_000_000, 0.4)), ("b", result("cpu", 500_000, 0.2))):
        (tmp_path / name).write_text(json.dumps(made))
        monkeypatch.setattr("sys.argv", ["refit", "--add", str(tmp_path / name), "--docs", str(tmp_path / "docs")])
        (tmp_path / "docs").mkdir(exist_ok=True)
        refit.main()
    text = (tmp_path / "docs/performance.md").read_text()
    assert "| 0.5 M parameters, cpu, 1 worker(s) | 8.00 G parameters, NVIDIA H200, 1 worker(s) |" in text
    assert "proof and probe included | **190** | **390** |" in text
    assert "| broadcast | 50.0 | 100 |" in text
    assert "commit" not in text, "a phase that no run had is no row"
    assert "<svg" in (tmp_path / "docs/bench/refit.svg").read_text()


def test_what_is_no_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["refit", "--add", str(tmp_path / "bad.json"), "--docs", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"bad\.json: no result of `functional refit-rates`"):
        refit.main()
    assert not (tmp_path / "performance.md").exists()
