"""The run's report: `report.json` for programs, `junit.xml` for pipelines; both written atomically."""

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from functional.runtime.fleet.programs import release_dir
from functional.suite.checks import Check

SCHEMA_VERSION = 1


def write_report(out: Path, report: dict[str, Any], checks: list[Check], error: str | None) -> None:
    """Write `out`/report.json and `out`/junit.xml. `error`: why the run ended early, None when it ran to its end."""
    passed = error is None and bool(checks) and all(check.passed for check in checks)
    body = {
        "schema_version": SCHEMA_VERSION,
        "status": "passed" if passed else "failed",
        "error": error,
        "release": read_release(),
        "checks": [vars(check) for check in checks],
        **report,
    }
    write_atomically(out / "report.json", json.dumps(body, indent=2, ensure_ascii=False, default=str) + "\n")
    write_atomically(out / "junit.xml", junit(checks, error, report.get("seconds", 0.0)))


def read_release() -> dict[str, Any]:
    """What the image says of itself: build.json and image.json, as far as they are there."""
    found = {}
    for name in ("build", "image"):
        path = release_dir() / f"{name}.json"
        if path.is_file():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def junit(checks: list[Check], error: str | None, seconds: float) -> str:
    """JUnit XML: one test case a check, and one called «run» for a run that ended early."""
    failures = sum(not check.passed for check in checks)
    suite = ElementTree.Element(
        "testsuite",
        name="functional",
        tests=str(len(checks) + (error is not None)),
        failures=str(failures),
        errors=str(int(error is not None)),
        time=f"{seconds:.3f}",
    )
    if error is not None:
        run = ElementTree.SubElement(suite, "testcase", classname="functional", name="run", time=f"{seconds:.3f}")
        ElementTree.SubElement(run, "error", message=_printable(error.splitlines()[0])).text = _printable(error)
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname="functional", name=check.name)
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = _printable(check.detail)
        else:
            ElementTree.SubElement(case, "failure", message=_printable(check.detail))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _printable(text: str) -> str:
    """XML 1.0 has no place for most control characters."""
    return "".join(c if c in "\n\t" or ord(c) >= 32 else "\ufffd" for c in text)


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, sync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
