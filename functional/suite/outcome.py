"""The folder that a run leaves: emptied before it, pages and a summary after it."""

import shutil
import sys
from pathlib import Path

from functional.suite.pages.render import write_pages
from functional.suite.report import Report

FILES = (
    ".reserve",
    "report.json",
    "report.html",
    "report.md",
    "junit.xml",
    "rollouts.jsonl",
    "requests.jsonl",
    "metrics.jsonl",
    "usage.jsonl",
    "agreement.jsonl",
    "recipe.json",
    "processes.json",
    "events.jsonl",
    "routers.json",
    "routers.md",
    "routers.svg",
    "learning.json",
    "learning.svg",
    "chat.json",
)
"""What a run writes beside its logs, and removes of an earlier one."""


def make_folders(out: Path) -> Path:
    """Make `out` with an empty folder for logs, and remove an earlier run's files; returns the folder for logs."""
    out.mkdir(parents=True, exist_ok=True)
    log_dir = out / "logs"
    shutil.rmtree(log_dir, ignore_errors=True)
    log_dir.mkdir()
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    for journal in out.glob("requests-*.jsonl"):
        journal.unlink()
    return log_dir


def write_pages_or_say(out: Path) -> None:
    """report.html and report.md; that they cannot be made changes nothing about the run."""
    try:
        write_pages(out)
    except Exception as error:
        print(f"warning: no report.html: {type(error).__name__}: {error}", file=sys.stderr)


def summarize(report: Report, out: Path) -> None:
    """Print the outcome."""
    failed = [check for check in report.checks if not check.passed]
    for check in failed:
        print(f"FAILED {check.name}: {check.detail}", file=sys.stderr)
    if report.error is not None:
        print(f"error: {report.error}", file=sys.stderr)
    total = len(report.checks)
    print(f"{total - len(failed)} of {total} checks passed in {report.seconds:.0f} s; report: {out / 'report.html'}")
