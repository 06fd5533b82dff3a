"""`functional doctor`: examine a folder, and say what was found."""

import json
from dataclasses import asdict
from pathlib import Path

from functional.suite.doctor.examine import examine
from functional.suite.doctor.finding import Finding, Result
from functional.suite.doctor.folder import RunFolder

MARKS = {Result.OK: "✓", Result.PROBLEM: "✗", Result.RECOVERED: "!", Result.UNKNOWN: "?"}


def show_findings(out: Path, as_json: bool) -> int:
    """Print the findings of the run in `out`; 1 if there is a problem. Raises ConfigError where there is no run."""
    run = RunFolder.open(out)
    findings = examine(run)
    if as_json:
        answer = {"state": run.state, "findings": [asdict(one) for one in findings]}
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print("\n".join(as_text(findings)))
    return int(any(one.result is Result.PROBLEM for one in findings))


def as_text(findings: list[Finding]) -> list[str]:
    """Lines for people."""
    lines = []
    for one in findings:
        cause = f" [{one.cause}]" if one.cause else ""
        lines.append(f"{MARKS[one.result]} {one.symptom}: {one.found}{cause}")
        lines.append(f"    looked at: {one.looked_at}")
        if one.next_step:
            lines.append(f"    next: {one.next_step}")
    return lines
