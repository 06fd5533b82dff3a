"""One run of the suite: take the recipe, run it, take everything down, report.

    python -m functional.suite.driver RECIPE OUT RUN_DIR [key=value …]

`functional run` starts this under a guard, so that nothing of a run outlives it. RUN_DIR is an empty folder for sockets
and data; it goes away with the run.
"""

import json
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.fleet.programs import Programs, find_programs
from functional.runtime.recipe.load import RecipeError
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.options import shown_options
from functional.runtime.recipe.rules import TOOL_DATA, find_unsendable, find_warnings
from functional.suite.agent_session import AgentSession
from functional.suite.async_session import AsyncSession
from functional.suite.cluster import check_devices
from functional.suite.hardware import read_hardware
from functional.suite.leftovers import drop_memory, find_leftovers
from functional.suite.outcome import make_folders, summarize, write_pages_or_say
from functional.suite.preflight import Prepared, prepare
from functional.suite.report import EngineOption, Report, read_release, write_atomically, write_report
from functional.suite.reserve import Reserve, is_full
from functional.suite.session import Session, interrupt
from functional.suite.versions import read_versions


def run(
    recipe_path: Path, out: Path, run_dir: Path, overrides: list[str], session_type: type[Session] | None = None
) -> int:
    """Run the recipe and write `out`/report.json, report.html, report.md, junit.xml, rollouts.jsonl and logs/.

    session_type: what is done with the fleet; training, as the recipe's data ask for it, unless given. Returns 0 when
    every check passed, 1 when not, 2 for a bad recipe or environment.
    """
    try:
        prepared = prepare(recipe_path, overrides)
        session_type = session_type or find_session_type(prepared.recipe)
        if problems := find_unsendable(prepared.recipe) + session_type.find_misfits(prepared.recipe):
            raise RecipeError(recipe_path, problems)
        programs = find_programs()
        check_devices(prepared.recipe)
        report = begin_report(prepared, programs)
        log_dir, reserve = prepare_out(out, report)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    session = session_type(prepared, report, out, run_dir)
    for warning in report.warnings:
        session.say(f"warning: {warning}")
    failure, is_bad_input = carry_out(session, programs, log_dir, reserve)
    shutil.rmtree(run_dir, ignore_errors=True)
    left = find_leftovers(run_dir, session.ports, session.worker_folders, drop_memory(session.memory))
    leftovers = [*session.remains, *left]
    session.checks.add(
        "teardown.nothing_left",
        not leftovers,
        "; ".join(leftovers) or "no process, port, shared memory or folder of the run is left",
    )
    report.finish(session.checks, failure, time.monotonic() - session.began)
    write_report(out, report)
    write_pages_or_say(out)
    summarize(report, out)
    if is_bad_input:
        return 2
    return 0 if report.status == "passed" else 1


def find_session_type(recipe: Recipe) -> type[Session]:
    """Of training, as the recipe asks for it."""
    if recipe.data.dataset_name == TOOL_DATA:
        return AgentSession
    return AsyncSession if recipe.grpo.async_grpo.enabled else Session


def begin_report(prepared: Prepared, programs: Programs) -> Report:
    """The report of a run with these inputs. Raises ConfigError when the image is damaged."""
    recipe = prepared.recipe
    report = Report.begin(
        release=read_release(),
        recipe=recipe.shown(),
        versions=read_versions(programs),
        data=prepared.data,
        options=[EngineOption(**option) for option in shown_options(recipe.options)],
        warnings=find_warnings(recipe),
    )
    report.hardware = read_hardware()
    return report


def prepare_out(out: Path, report: Report) -> tuple[Path, Reserve]:
    """The folder for logs, and what is kept free for the end. Raises ConfigError where `out` cannot be written to."""
    try:
        log_dir = make_folders(out)
        reserve = Reserve(out)
        write_atomically(out / "recipe.json", json.dumps(report.recipe, indent=2) + "\n")
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"{where}: {error.strerror}: name a folder with room, to write to, as --out") from error
    return log_dir, reserve


def carry_out(session: Session, programs: Programs, log_dir: Path, reserve: Reserve) -> tuple[str | None, bool]:
    """Run the session and take it down. Returns why it ended early, if it did, and whether its input is the cause."""
    recipe = session.recipe
    try:
        session.run(programs)
    except RunError as fault:
        return recipe.scrub(str(fault)), isinstance(fault, ConfigError)
    except Exception as unexpected:
        reserve.give_back()
        with suppress(OSError):
            (log_dir / "driver.log").write_text(recipe.scrub(traceback.format_exc()), encoding="utf-8")
        what = recipe.scrub(f"{type(unexpected).__name__}: {' '.join(str(unexpected).split())[:500]}")
        if is_full(unexpected):
            what = f"a disk is full ({what}): df -h {session.out} {session.run_dir}"
        return f"{what} (traceback in {log_dir}/driver.log)", False
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end below is bounded, and must not be cut short
        reserve.give_back()
        session.say("taking the run down")
        session.close()
    return None, False


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
