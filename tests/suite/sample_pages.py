"""Folders of runs that are hard to show, and their pages: `python -m tests.suite.sample_pages OUT`."""

import sys
from pathlib import Path

from functional.runtime.jsonlines import JsonLines
from functional.runtime.refit.machine import Event, State, Transition
from functional.suite.checklist import Checklist
from functional.suite.data import DataRecord
from functional.suite.pages.render import write_pages
from functional.suite.report import (
    Asynchronous,
    NodePlace,
    Refit,
    Release,
    Report,
    Step,
    Topology,
    write_report,
)

HOSTILE = '<script>alert("x")</script> | `code` \x1b[31m'


def begun(out: Path) -> Report:
    out.mkdir(parents=True, exist_ok=True)
    data = DataRecord("arithmetic", "built in", 155, "0" * 64)
    return Report.begin(Release(), recipe={"note": HOSTILE}, versions={}, data=data, options=[], warnings=[HOSTILE])


def ended_early(out: Path) -> None:
    """Nothing came up, and what was said is hostile."""
    report = begun(out)
    checks = Checklist()
    checks.add("teardown.nothing_left", False, HOSTILE)
    report.finish(checks, f"worker 0 exited with status 1; {HOSTILE}\nmore", 3.0)
    finish(out, report)


def long_run(out: Path, steps: int = 3000, workers: int = 256) -> None:
    """Many steps, many workers, one update that failed once, and measurements that are not finite."""
    report = begun(out)
    report.phases = {"ray": 3.0, "fleet": 70.0}
    places = [NodePlace(name="n0", address="10.0.0.1", has_trainer=True, is_drivers=True, engines=[*range(workers)])]
    report.topology = Topology(
        workers={index: 10**18 + index for index in range(workers)},
        seeds={},
        device="cuda",
        share_gpu=False,
        note="",
        nodes=places,
    )
    checks = Checklist()
    with JsonLines(out / "events.jsonl") as events, JsonLines(out / "rollouts.jsonl") as rollouts:
        events.append({"time": 1000.0, "event": "run: starting"})
        for step in range(1, steps + 1):
            noise = float("nan") if step % 7 == 0 else 0.001 * (step % 13)
            more = {
                "logp_noise": noise,
                "logp_noise_bound": 0.02,
                "logp_shift": 0.1,
                "token_mult_prob_error": 1 + noise,
            }
            report.steps.append(Step(step=step, samples=64, truncated=0, mean_reward=step / steps, **more))
            phases = {"drain": 0.1, "transfer": 0.2 + step % 5}
            report.refits.append(update(step, phases))
            report.refit_transitions += transitions(step, failed=step == 17)
            events.append({"time": 1000.0 + 10 * step, "event": f"step {step}: generating"})
            events.append({"time": 1006.0 + 10 * step, "event": f"refit {step}: warm probe"})
            rollouts.append({"step": step, "instance_id": 10**18 + step % workers, "answered_at": 1004.0 + 10 * step})
            checks.add(f"step{step}.tokens_correct", True, "64 samples")
    with JsonLines(out / "usage.jsonl") as usage:
        for second in range(3000):
            parts = {"driver": [0.1, 2**30], "worker-0": [1.5, 2**33]}
            usage.append({"time": 1000.0 + second, "parts": parts, "gpus": [[50.0, 2**36], [90.0, 2**37]]})
    report.asynchronous = Asynchronous(
        bound=2,
        in_flight_updates=True,
        seconds=30000.0,
        training_s=12000.0,
        generating_s=18000.0,
        both_s=9000.0,
        trainer_waited_s=4000.0,
        trainer_idle_s=18000.0,
        engines_idle_s=12000.0,
        ages={0: 64, 1: 100_000, 2: 91_936},
        spanning=1234,
        unused=0,
    )
    report.finish(checks, None, 30000.0)
    finish(out, report)


def update(version: int, phases: dict[str, float]) -> Refit:
    return Refit(
        asked=version,
        version=version,
        attempts=1,
        bytes_sent=1,
        tensors=1,
        proved=1,
        proved_bytes=[1],
        by_plan=True,
        no_plan={},
        phases=phases,
        probes=[],
        replaced=[],
        total_s=sum(phases.values()),
    )


def transitions(version: int, failed: bool) -> list[Transition]:
    first = Transition(1.0, 0.5, State.SERVING, Event.BEGIN, State.DRAINING, version, 1, False, "update")
    last = (Event.FAILED, State.RECOVERING) if failed else (Event.DONE, State.PAUSING)
    return [first, Transition(2.0, 0.5, State.DRAINING, *last, version, 1, False, HOSTILE if failed else "")]


def finish(out: Path, report: Report) -> None:
    write_report(out, report)
    write_pages(out)


if __name__ == "__main__":
    ended_early(Path(sys.argv[1], "early"))
    long_run(Path(sys.argv[1], "long"))
