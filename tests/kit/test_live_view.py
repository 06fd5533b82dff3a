"""What `submit` shows of a running job."""

from pathlib import Path

from kit.submit import _progress


def test_progress_comes_once_and_in_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    assert _progress(log, 0) == ([], 0)
    log.write_text("a warning\n[   0.5 s] ray ready in 0.5 s\n[  41.0 s] 2 prompts × 4")
    first, read = _progress(log, 0)
    assert first == ["[   0.5 s] ray ready in 0.5 s"]
    assert _progress(log, read) == ([], read)
    with log.open("a") as file:
        file.write(" generations\n[1000.0 s] taking the run down\n")
    second, read = _progress(log, read)
    assert second == ["[  41.0 s] 2 prompts × 4 generations", "[1000.0 s] taking the run down"]
    assert read == log.stat().st_size
