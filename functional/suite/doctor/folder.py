"""A run's folder as the doctor reads it: everything is optional, since a run may have ended anywhere."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.sockets import command_line
from functional.suite.pages.run_files import RunFiles

State = Literal["running", "ended", "dead"]
LOG_END_BYTES = 2_000_000
"""A cause is looked for in the end of a log: what ends a process stands there."""
CLOCK_S = 2.0
"""By how much the times of the kernel and of files may differ."""
_MOVE = re.compile(r"refit (?P<version>\S+) (?P<before>\w+) → (?P<after>\w+): (?P<reason>.*)", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Move:
    """A transition of the update's state machine, from events.jsonl."""

    time: float
    version: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class RunFolder:
    """report: of a run that came to its end, else empty; recipe: as resolved, empty if the run wrote none."""

    out: Path
    report: dict[str, Any]
    recipe: dict[str, Any]
    files: RunFiles
    processes: dict[str, list[int]]
    run_dir: Path | None

    @classmethod
    def open(cls, out: Path) -> "RunFolder":
        """Raises ConfigError for a folder without a trace of a run."""
        if not (out / "events.jsonl").is_file() and not (out / "report.json").is_file():
            raise ConfigError(f"{out}: no events.jsonl and no report.json: name the folder of a run (its --out)")
        files = RunFiles.read(out)
        report = _json(out / "report.json")
        run_dir = files.events[0].get("run_dir") if files.events else None
        return cls(
            out=out,
            report=report,
            recipe=report.get("recipe") or _json(out / "recipe.json"),
            files=files,
            processes=_json(out / "processes.json"),
            run_dir=Path(run_dir) if run_dir else None,
        )

    @property
    def state(self) -> State:
        """Running: its driver is alive on this machine; ended: it wrote its report; dead: neither."""
        if self.report:
            return "ended"
        return "running" if self.driver_alive else "dead"

    @property
    def driver_alive(self) -> bool:
        """Ids of processes come again, so that the driver is known by the run's own folder on its command line."""
        return any(self.run_dir is not None and str(self.run_dir) in command_line(pid) for pid in self._pids("driver"))

    def alive(self) -> dict[str, list[int]]:
        """Part → its processes that are there on this machine."""
        found = {name: [pid for pid in pids if self._is_ours(pid)] for name, pids in self.processes.items()}
        return {name: pids for name, pids in found.items() if pids}

    def logs(self) -> list[Path]:
        return sorted((self.out / "logs").glob("*.log"))

    def log_end(self, path: Path) -> str:
        """The end of a log, colours removed."""
        try:
            with path.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LOG_END_BYTES))
                return _COLOURS.sub("", file.read().decode(errors="replace"))
        except OSError:
            return ""

    def moves(self) -> list[Move]:
        found = ((row["time"], _MOVE.fullmatch(row["event"])) for row in self.files.events)
        return [Move(float(time), match[1], match[2], match[3], match[4]) for time, match in found if match]

    def last_event(self) -> tuple[float, str]:
        """When, and what the run was doing then."""
        steps = [row for row in self.files.events if not _MOVE.fullmatch(row["event"])]
        return (float(steps[-1]["time"]), str(steps[-1]["event"])) if steps else (0.0, "nothing")

    def setting(self, path: str, otherwise: float) -> float:
        """A number of the recipe."""
        value: Any = self.recipe
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else otherwise

    def checks(self, *endings: str) -> list[dict[str, Any]]:
        """Checks of the report whose name ends so."""
        return [check for check in self.report.get("checks", []) if check["name"].endswith(endings)]

    def _pids(self, name: str) -> list[int]:
        return [int(pid) for pid in self.processes.get(name, [])]

    def _is_ours(self, pid: int) -> bool:
        """Ids come again: ours was started after the run, and before the file that names it was written."""
        try:
            process = psutil.Process(pid)
            started, status = process.create_time(), process.status()
            named = (self.out / "processes.json").stat().st_mtime
        except (OSError, psutil.Error):
            return False
        in_time = self.files.began - CLOCK_S <= started <= named + CLOCK_S
        return bool(status != psutil.STATUS_ZOMBIE and in_time)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
