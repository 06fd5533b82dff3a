"""What `submit` shows of a running job, and what it keeps of one that has ended."""

from pathlib import Path

from kit.slurm import Job
from kit.submit import _job_facts, _progress


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


def test_a_job_that_ran_again_began_when_it_was_submitted(tmp_path: Path) -> None:
    """Of a phase that came twice (two nodes have one each), the first counts; a half line counts as none."""
    job = Job("7", "COMPLETED", 0, 0, "None", "node[1-2]", "")
    lines = [("queued", 100.0), ("started", 100.4), ("container", 103.0), ("container", 109.0)]
    text = "".join(f'{{"phase": "{name}", "node": "node1", "at": {at}}}\n' for name, at in lines)
    (tmp_path / "phases.jsonl").write_text(f'{text}{{"phase": "ended"')
    facts = _job_facts(job, tmp_path, "runner")
    assert facts.seconds == {"queued": 0.0, "started": 0.4, "container": 3.0}
    assert (facts.id, facts.nodes, facts.backend) == ("7", "node[1-2]", "runner")
    assert _job_facts(job, tmp_path / "none", "oci").seconds == {}
