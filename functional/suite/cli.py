"""`functional`: what the image can do from its command line."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.fleet import guard
from functional.suite.cluster import ray_environment

GRACE_S = 60.0
NEMO_RL_GRACE_S = 300.0
"""Its script has a minute to end, and then the nodes of a cluster are asked what is left."""
COMPLETE = "_FUNCTIONAL_COMPLETE"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Managed Dynamo generation, and its proof.",
)
RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe, for example recipes/grpo_cpu.yaml.")
]
OverridesArgument = Annotated[list[str] | None, typer.Argument(metavar="[key=value …]", help="Keys to override.")]


class Driver(StrEnum):
    """Whose training loop makes the run."""

    SUITE = "suite"
    NEMO_RL = "nemo-rl"


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, records and logs.")] = Path("functional-out"),
    driver: Annotated[Driver, typer.Option(help="Whose trainer: the suite's, or NeMo RL's own script.")] = Driver.SUITE,
    deadline_s: Annotated[
        float | None, typer.Option(min=1, help="nemo-rl: seconds after which its script is stopped; 3600 if none.")
    ] = None,
    token_error: Annotated[
        float | None,
        typer.Option(
            min=1, help="nemo-rl: train/token_mult_prob_error has to stay below; 1.05, its own test's bound, if none."
        ),
    ] = None,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="nemo-rl: trainer and workers on this machine's first GPU, a test.")
    ] = False,
) -> None:
    """Run the recipe and check everything about it.

    With --driver nemo-rl the recipe is one of NeMo RL's, and its unmodified run_grpo.py runs it (docs/nemo-rl.md).

    Example: functional run recipes/grpo_cpu.yaml grpo.max_num_steps=3 --out /tmp/run
    """
    given = {"deadline_s": deadline_s, "token_error": token_error, "share_gpu": share_gpu or None}
    options = {name: value for name, value in given.items() if value is not None}
    if driver is Driver.SUITE:
        for name in options:
            raise typer.BadParameter("is for --driver nemo-rl", param_hint=f"--{name.replace('_', '-')}")
        raise typer.Exit(run_module("functional.suite.driver", recipe, out, *(overrides or [])))
    if math.isnan(options.get("deadline_s", 0.0)) or math.isnan(options.get("token_error", 0.0)):
        raise typer.BadParameter("must be a number", param_hint="--deadline-s, --token-error")
    words = (json.dumps(options), *(overrides or []))
    raise typer.Exit(run_module("functional.suite.nemo_rl.driver", recipe, out, *words, grace_s=NEMO_RL_GRACE_S))


@app.command()
def config(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a refused recipe too.")] = False,
    ask_engine: Annotated[bool, typer.Option("--engine", help="Ask the engine's own parser too (10 s).")] = False,
) -> None:
    """Validate a recipe; show what becomes of each engine option, and what the recipe resolves to.

    Example: functional config recipes/grpo_cpu.yaml policy.generation.vllm_kwargs.max_num_seqs=16
    """
    from functional.suite.show_config import show_config

    raise typer.Exit(show_config(recipe, overrides or [], as_json, ask_engine))


@app.command()
def fault(
    case: Annotated[
        str, typer.Argument(metavar="CASE", help="Such as worker-killed-generating; an unknown one lists all.")
    ],
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for the run; emptied first.")] = Path("functional-fault"),
    deadline_s: Annotated[float, typer.Option(help="Seconds from the kill to the run's end.")] = 60,
) -> None:
    """Run the recipe, kill a part of it at a known moment, and check the end it comes to.

    Example: functional fault worker-killed-generating recipes/grpo_cpu.yaml --out /tmp/fault
    """
    from functional.suite.faults import outcome_json, run_case

    outcome = run_case(case, recipe, out.resolve(), overrides or [], deadline_s)
    typer.echo(outcome_json(outcome))
    raise typer.Exit(1 if outcome.problems else 0)


@app.command("refit-faults")
def refit_faults(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, records and logs.")] = Path("functional-faults"),
    only: Annotated[str, typer.Option(help="Names of cases, with commas; all if empty.")] = "",
) -> None:
    """Updates under faults, on one fleet of two workers: sends, clears, workers and at last the trainer.

    Example: functional refit-faults recipes/grpo_cpu.yaml --only lying-sends,clear-ignored --out /tmp/faults
    """
    raise typer.Exit(run_module("functional.suite.refit_faults", recipe, out, only, *(overrides or [])))


@app.command("probe-rates")
def probe_rates(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, records and logs.")] = Path("functional-probe"),
) -> None:
    """Measure how often a refit's probe is right on this engine and model: false alarms, and old weights caught.

    Example: functional probe-rates recipes/grpo_cpu.yaml --out /tmp/probe
    """
    raise typer.Exit(run_module("functional.suite.probe_rates", recipe, out, *(overrides or [])))


@app.command()
def learning(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for learning.json, learning.svg and the report.")] = Path(
        "functional-learning"
    ),
) -> None:
    """Measure whether the reward rises over three seeds, and stays where no update reaches the engines.

    Example: functional learning recipes/learning_cpu.yaml --out /tmp/learning
    """
    raise typer.Exit(run_module("functional.suite.learning", recipe, out, *(overrides or [])))


@app.command("refit-rates")
def refit_rates(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for refit-rates.json and the report.")] = Path("functional-rates"),
) -> None:
    """Measure the phases of an update beside vLLM's own protocol and a bare broadcast of the same bytes.

    Example: functional refit-rates recipes/grpo_cpu.yaml --out /tmp/rates
    """
    raise typer.Exit(run_module("functional.suite.refit_rates", recipe, out, *(overrides or [])))


@app.command("compare-routers")
def compare_routers(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for the comparison, records and logs.")] = Path(
        "functional-routers"
    ),
    modes: Annotated[str, typer.Option(help="Router modes, with commas.")] = "kv,round-robin",
    repeats: Annotated[int, typer.Option(help="Measurements of each mode under each workload.")] = 8,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 3,
) -> None:
    """Compare router modes on one fleet: throughput, time to first token, cache hits, balance; table, plot, statement.

    Prompts, samples a prompt, length and concurrency are the recipe's.

    Example: functional compare-routers recipes/routers_cpu.yaml --modes kv,round-robin,random --out /tmp/routers
    """
    words = (modes, str(repeats), str(turns), *(overrides or []))
    raise typer.Exit(run_module("functional.suite.compare_routers", recipe, out, *words))


@app.command()
def report(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a run that has a report.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the names of the files as JSON.")] = False,
) -> None:
    """Make report.html and report.md of a run again.

    Example: functional report /tmp/run
    """
    from functional.suite.pages.render import write_pages

    written = [str(path) for path in write_pages(out)]
    typer.echo(json.dumps(written) if as_json else "\n".join(written))


@app.command()
def doctor(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a run, running or ended (its --out).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with a run: what was looked at, what was found, the next step. Exit status 1 with a problem.

    Example: functional doctor /tmp/run
    """
    from functional.suite.doctor.show import show_findings

    raise typer.Exit(show_findings(out, as_json))


@app.command("serve-chat")
def serve_chat(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, records and logs.")] = Path("functional-chat"),
    host: Annotated[str, typer.Option(help="Address to listen on; one of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = 0,
) -> None:
    """Start the recipe's fleet, and serve chat with exact token IDs until stopped (docs/chat.md).

    Prints the server's URL once it answers; OUT/chat.json has it too.

    Example: functional serve-chat recipes/agent_cpu.yaml --port 8000 --out /tmp/chat
    """
    dynamo = "policy.generation.dynamo_cfg"
    words = ["policy.generation.vllm_cfg.expose_http_server=true", f"{dynamo}.chat_host={host}"]
    words.append(f"{dynamo}.chat_port={port}")
    raise typer.Exit(run_module("functional.suite.serve", recipe, out, *words, *(overrides or [])))


@app.command("make-model")
def make_model_command(
    out: Annotated[Path, typer.Argument(help="Folder to make; must not exist.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights and lessons.")] = 0,
    shape: Annotated[
        str,
        typer.Option(help="tiny (taught arithmetic), tools (taught to call them); Qwen3-0.6B or Qwen3-8B (random)."),
    ] = "tiny",
) -> None:
    """Make a small Qwen3 with its tokenizer, the same bytes each time on one machine.

    So the embedded models were made, once: builtin:arithmetic and builtin:tools are parts of this package.

    Example: functional make-model /tmp/tiny
    """
    from functional.suite.model import make_model, random_model
    from functional.suite.tool_lessons import make_tool_model

    taught = {"tiny": make_model, "tools": make_tool_model}
    try:
        summary: Any = taught[shape](out, seed) if shape in taught else random_model(out, shape, seed)
    except (FileExistsError, ValueError) as error:
        raise RunError(str(error)) from error
    typer.echo(json.dumps(asdict(summary), indent=2))


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")] = "bash") -> None:
    """Print the shell's completion of this command line.

    Example: eval "$(functional completion bash)"
    """
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(f"no completion for {shell!r}: choose bash, zsh or fish")
    typer.echo(get_completion_script(prog_name="functional", complete_var=COMPLETE, shell=shell))


def run_module(module: str, recipe: Path, out: Path, *words: str, grace_s: float = GRACE_S) -> int:
    """Run a module that takes RECIPE OUT RUN_DIR and more words, under a guard. Returns its exit status."""
    run_dir = tempfile.mkdtemp(prefix="rl", dir="/tmp")  # short: socket paths hold at most 107 bytes
    return run_guarded(
        [sys.executable, "-m", module, str(recipe), str(out.resolve()), run_dir, *words], run_dir, grace_s
    )


def run_guarded(command: list[str], folder: str, grace_s: float = GRACE_S) -> int:
    """Run `command` so that nothing of it outlives this process, nor `folder` the run.

    SIGINT, SIGTERM and SIGHUP reach it as SIGTERM; it has `grace_s` to end then. Returns its exit status.
    """
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", guard.__file__, str(read_end), str(grace_s), folder, *command],
        env=os.environ | ray_environment(),
        pass_fds=(read_end,),
        start_new_session=True,
    )
    os.close(read_end)

    def forward(_signum: int, _frame: Any) -> None:
        process.send_signal(signal.SIGTERM)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, forward)
    status = process.wait()
    os.close(write_end)
    return status


def main() -> None:
    """Entry point: one line for an error the user can act on."""
    completion_init()
    try:
        app(prog_name="functional", complete_var=COMPLETE)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
