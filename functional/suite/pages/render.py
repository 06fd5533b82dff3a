"""Write report.html and report.md.

    write_pages(out)

reads report.json of a run's folder and what lies beside it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import ValidationError

from functional.runtime.errors import ConfigError
from functional.suite.checklist import Check
from functional.suite.pages.charts import charts
from functional.suite.pages.run_files import RunFiles
from functional.suite.pages.updates import faults, updates
from functional.suite.pages.verdict import by_section, chain, conditions, scope
from functional.suite.report import Report, write_atomically

MOST_PASSED = 200
"""Checks that passed, of those shown under one heading; every one that failed is shown."""
PAGES = ("report.html", "report.md")


@dataclass(frozen=True)
class Shown:
    """Checks under a heading; `total` and `passed` count those left out too."""

    name: str
    checks: list[Check]
    total: int
    passed: int


def write_pages(out: Path) -> list[Path]:
    """Render the run in `out` again; returns what was written. Raises ConfigError when its report cannot be read."""
    path = out / "report.json"
    try:
        report = Report.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file: name the folder of a run that came to its end") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}: {where}: {first['msg']}: this is no report of this version of the suite") from error
    written = []
    for name, text in render(report, RunFiles.read(out)).items():
        write_atomically(out / name, text)
        written.append(out / name)
    return written


def render(report: Report, files: RunFiles) -> dict[str, str]:
    """Page → its text."""
    environment = Environment(
        loader=PackageLoader("functional.suite.pages", "."),
        autoescape=lambda name: bool(name and name.endswith(".html")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell
    environment.filters["bytes"] = size_text
    facts = _facts(report, files)
    return {name: environment.get_template(name).render(facts) for name in PAGES}


def _facts(report: Report, files: RunFiles) -> dict[str, Any]:
    shown, left_out = updates(report)
    plots = charts(report, files)
    return {
        "report": report,
        "failed": [check for check in report.checks if not check.passed],
        "passed": sum(check.passed for check in report.checks),
        "scope": scope(report),
        "conditions": conditions(report),
        "chain": chain(report, files.out),
        "sections": [shortened(name, held) for name, held in by_section(report.checks)],
        "plots": [(plot, Markup(plot.svg)) for plot in plots],
        "updates": shown,
        "updates_left_out": left_out,
        "faults": faults(report),
        "files": files.listed(),
        "broken": files.broken,
        "recipe": json.dumps(report.recipe, indent=2, ensure_ascii=False),
        "style": Markup(Path(__file__).with_name("style.css").read_text(encoding="utf-8")),
    }


def shortened(name: str, held: Sequence[Check]) -> Shown:
    """Of a long run, the checks that failed and the last of the others."""
    passed = [check for check in held if check.passed]
    kept = set(map(id, passed[-MOST_PASSED:]))
    return Shown(name, [check for check in held if not check.passed or id(check) in kept], len(held), len(passed))


def cell(text: object) -> str:
    """Text as it may stand in a cell of a Markdown table."""
    plain = " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("`", "'")


def size_text(size: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
