#!/usr/bin/env python3
"""The command line of the kit: one subcommand per stage of the release, each a few lines that call kit/."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

_VENV = Path(__file__).resolve().parent / ".venv"
_elsewhere = Path(sys.prefix).resolve() != _VENV.resolve()
if _elsewhere and (_VENV / "bin/python").exists() and "KIT_NO_VENV" not in os.environ:
    os.execv(_VENV / "bin/python", [str(_VENV / "bin/python"), __file__, *sys.argv[1:]])

try:
    import typer
    from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]
except ModuleNotFoundError as error:
    sys.exit(f"error: the kit's environment is missing ({error.name}): run `make env` in {_VENV.parent}")

from kit.errors import Interrupted, KitError  # noqa: E402

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

PROGRAM, COMPLETE = "build.py", "_BUILD_PY_COMPLETE"
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Profile = Annotated[str, typer.Option(envvar="PROFILE", help="Which locked set: cpu or cuda.")]
Name = Annotated[str, typer.Option(envvar="NAME", help="The release's folder: dist/NAME.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]…", help="In the image; after --, options of `functional run` too."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")]


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", envvar="QUIET", help="Print errors only.")] = False,
) -> None:
    from kit.steps import set_quiet

    if debug:
        os.environ["KIT_DEBUG"] = "1"
    set_quiet(quiet)


@app.command()
def lock(
    profile: Annotated[list[str] | None, typer.Argument(help="Which sets to write; all when none is named.")] = None,
    upgrade: Annotated[bool, typer.Option(help="Take newer versions that the .in files allow.")] = False,
    nemo_rl: Annotated[Path | None, typer.Option(help="Make the set nemo-rl for this tree of it.")] = None,
) -> None:
    """Rewrite the lockfiles from lockfiles/*.in.

    \b
    Examples: ./build.py lock cpu
              ./build.py lock nemo-rl --nemo-rl ~/RL
    """
    from kit.lock import write_locks

    write_locks(profile or [], upgrade=upgrade, nemo_rl=nemo_rl)


@app.command()
def fetch(
    profile: Profile = "cpu",
    nemo_rl: Annotated[bool, typer.Option("--nemo-rl", help="Also what an image with NeMo RL needs besides.")] = False,
) -> None:
    """Download every locked input, verified, to dist/inputs/PROFILE.

    Example: ./build.py fetch --profile cpu
    """
    from kit.fetch import fetch_inputs

    fetch_inputs(profile, nemo_rl=nemo_rl)


@app.command()
def image(
    name: Name = "",
    profile: Profile = "cpu",
    dynamo: Annotated[bool, typer.Option(help="With the Dynamo environment; without, the trainer image.")] = True,
    nemo_rl: Annotated[
        Path | None, typer.Option(envvar="NEMO_RL", help="With NeMo RL and its environment: a clone of it.")
    ] = None,
    lean: Annotated[bool, typer.Option(help="Keep no build cache: saves 11 GB of disk.")] = False,
    json: Json = False,
) -> None:
    """Build the image into dist/NAME/oci and record its digest.

    \b
    Examples: ./build.py image --profile cpu --name cpu
              ./build.py image --name nemo --nemo-rl ~/RL
    """
    from kit.image import make_image

    made = make_image(name or profile, profile, with_dynamo=dynamo, nemo_rl=nemo_rl, lean=lean)
    _answer(made.model_dump_json(indent=2), json)


@app.command()
def push(
    target: Annotated[str, typer.Argument(envvar="IMAGE", help="Reference to push to; the own registry if none.")] = "",
    name: Name = "cpu",
    json: Json = False,
) -> None:
    """Copy the image's bytes to a registry and check that its digest is the same there.

    Examples: ./build.py push
              ./build.py push registry.example.com/nemo-rl:dynamo
    """
    from kit.push import push_image

    _answer(push_image(name, target).model_dump_json(indent=2), json)


@app.command()
def services(
    action: Annotated[str, typer.Argument(help="start, stop, status, or env: variables for docker typed by hand.")],
    json: Json = False,
) -> None:
    """The kit's own Docker engine and registry: loopback only, everything in the state folder.

    \b
    Examples: ./build.py services status
              eval "$(./build.py services env)"; docker buildx build …
    """
    from kit.services import control_services

    control_services(action, json)


@app.command()
def clean(
    everything: Annotated[bool, typer.Option("--all", help="Also inputs, tools and the Python environment.")] = False,
) -> None:
    """Stop the services and remove releases and caches; what is removed is printed.

    Examples: ./build.py clean
              ./build.py clean --all
    """
    from kit.clean import remove_everything, remove_products

    remove_everything() if everything else remove_products()


@app.command()
def sqsh(
    source: Annotated[str, typer.Argument(help="OCI layout, docker-save archive, or registry reference.")] = "",
    name: Name = "cpu",
    compressor: Annotated[str, typer.Option(help="zstd, gzip or xz.")] = "zstd",
    level: Annotated[int | None, typer.Option(help="The compressor's (zstd 1, gzip 6, xz 6).")] = None,
    block_size: Annotated[int, typer.Option(help="Bytes: 4096 to 1048576, doubling.")] = 1 << 17,
    processors: Annotated[int, typer.Option(min=0, help="How many to use; 0: all.")] = 0,
    platform: Annotated[str, typer.Option(help="Which image of an index; this machine's.")] = "",
    keep_owner: Annotated[bool, typer.Option("--keep-owner", help="The image's owners, not root.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither use nor write the cache.")] = False,
    check: Annotated[bool, typer.Option("--verify", help="Read the result back, entry by entry.")] = False,
    json: Json = False,
) -> None:
    """Turn the image into dist/NAME/NAME.sqsh, for enroot, pyxis and `./build.py run`.

    \b
    Examples: ./build.py sqsh --verify
              ./build.py sqsh --name smoke registry.example.com/nemo-rl@sha256:…
    """
    from kit.sqsh import make_sqsh
    from sqsh.convert import Options

    wanted = Options(compressor, level, block_size, keep_owner, platform=platform, processors=processors)
    _answer(make_sqsh(name, source, wanted, not no_cache, check).model_dump_json(indent=2), json)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str] | None, typer.Argument(help="What to run; the image's own if nothing.")] = None,
    sqsh: Annotated[Path | None, typer.Option(help="The squashfs; dist/NAME/NAME.sqsh if none.")] = None,
    name: Name = "cpu",
    mount: Annotated[list[str] | None, typer.Option(help="SRC:DST[:ro]; may be repeated.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=value, or NAME to pass on the value it has here.")] = None,
    network: Annotated[str, typer.Option(help="host, or none for a loopback of its own.")] = "host",
    engine: Annotated[str, typer.Option(help="enroot, own, or auto: enroot where it is installed.")] = "auto",
) -> None:
    """Run a command inside a squashfs, as root, with the image's environment and entry point.

    Nothing it changes is kept. The exit status is the command's, 128 + N if signal N ended it.

    \b
    Examples: ./build.py run -- python -c 'import torch'
              ./build.py run --mount "$PWD/results:/results" --env HF_TOKEN --network none -- bash
    """
    from kit.layout import release
    from kit.run import make_container, run_container

    container = make_container(sqsh or release(name).sqsh, command or [], mount or [], env or [], network)
    raise typer.Exit(run_container(container, engine).status)


@app.command()
def functional(
    words: Words = None,
    name: Name = "",
    mount: Annotated[list[str] | None, typer.Option(help="SRC:DST[:ro], say a model's; may be repeated.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=value, or NAME to pass on the value it has here.")] = None,
    engine: Annotated[str, typer.Option(help="enroot, own, or auto: enroot where it is installed.")] = "auto",
    other: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: take this release's result on another machine.")
    ] = None,
) -> None:
    """Run the suite in a release's squashfs (the newest one's, if no name is given) and record the result.

    \b
    Examples: ./build.py functional
              ./build.py functional --name cpu recipes/grpo_cpu.yaml grpo.seed=7
              ./build.py functional --name cuda --mount /models/Qwen3-0.6B:/model:ro policy.model_name=/model
              ./build.py functional --name nemo -- --driver=nemo-rl examples/configs/grpo_math_1B_dynamo.yaml
              ./build.py functional --name cuda --from release.tgz
    """
    from kit.functional import adopt_functional, newest_release, run_functional

    name = name or newest_release()
    if other is not None:
        raise typer.Exit(adopt_functional(name, other))
    raise typer.Exit(run_functional(name, words or [], mounts=mount or [], env=env or [], engine=engine))


@app.command()
def submit(
    words: Words = None,
    name: Name = "",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, envvar="GPUS_PER_NODE", help="GPUs of a node.")] = 8,
    partition: Annotated[str, typer.Option(envvar="SLURM_PARTITION", help="The site's default if none.")] = "",
    account: Annotated[str, typer.Option(envvar="SLURM_ACCOUNT", help="The user's default if none.")] = "",
    time: Annotated[str, typer.Option(help="Time limit, as sbatch takes it; the partition's default if none.")] = "",
    mount: Annotated[list[str] | None, typer.Option(help="SRC:DST[:ro]; may be repeated.")] = None,
    logs: Annotated[
        Path | None, typer.Option(envvar="BASE_LOG_DIR", help="On what all nodes share; dist/NAME.")
    ] = None,
    backend: Annotated[str, typer.Option(help="pyxis, enroot, oci or runner; the first that is there.")] = "",
    sbatch: Annotated[list[str] | None, typer.Option(help="One more option for sbatch; may be repeated.")] = None,
    check: Annotated[bool, typer.Option(help="First check what would fail later.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the job, submit nothing.")] = False,
    json: Json = False,
) -> None:
    """Run the suite in a release's squashfs as a Slurm job, follow it, and record the result.

    The exit status is the job's: the suite's own, or 70 if the cluster failed.

    \b
    Examples: ./build.py submit --nodes 2 --gpus 8 --account A --partition P recipes/grpo_gpu.yaml
              ./build.py submit --gpus 2 --dry-run grpo.seed=7
    """
    from kit.functional import newest_release
    from kit.submit import Wanted, submit_suite

    wanted = Wanted(
        name=name or newest_release(), words=words or [], nodes=nodes, gpus=gpus, partition=partition, account=account,
        time=time, mounts=mount or [], logs=logs, backend=backend, options=sbatch or [],
    )  # fmt: skip
    raise typer.Exit(submit_suite(wanted, check=check, dry_run=dry_run, as_json=json))


@app.command()
def verify(name: Annotated[str, typer.Argument(envvar="NAME")] = "cpu", json: Json = False) -> None:
    """Compare every section of a release's record with its artifact: exit status 0 or 1.

    \b
    Example: ./build.py verify cpu
    """
    from kit.verify import report_findings, verify_release

    findings = verify_release(name)
    _answer(findings.model_dump_json(indent=2), json)
    raise typer.Exit(report_findings(findings))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A release's name, OCI layout, archive or reference.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The image to compare it with.")],
    json: Json = False,
) -> None:
    """List what differs between two images: exit status 0 equal, 1 different, 2 one cannot be read.

    \b
    Examples: ./build.py diff cpu ../other-clone/dist/cpu/oci
              ./build.py diff cpu registry.example.com/nemo-rl@sha256:…
    """
    from kit.diff import diff_images, report_difference

    difference = diff_images(first, second)
    if json:
        print(difference.model_dump_json(indent=2))
    raise typer.Exit(int(not difference.equal) if json else report_difference(difference))


@app.command()
def report(
    name: Annotated[str, typer.Argument(envvar="NAME")] = "cpu",
    history: Annotated[Path | None, typer.Option(help="Timings of nights; dist/nightly/history.jsonl.")] = None,
    json: Json = False,
) -> None:
    """Show a release: chain, sizes, layers, times, nights; dist/NAME/report.html has it for people.

    \b
    Examples: ./build.py report cpu
              ./build.py report cuda --json
    """
    from kit.release_page import write_release_page
    from kit.release_report import report_release, say_report

    found = report_release(name, history)
    page = write_release_page(found)
    if json:
        print(found.as_json())
    else:
        say_report(found, page)


@app.command()
def night(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The night's, with stages.tsv of ci/nightly.sh.")],
    name: Name = "cpu",
    history: Annotated[Path | None, typer.Option(help="Timings of all nights; history.jsonl beside FOLDER.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="A stage failed: times are kept, and not judged.")] = False,
    json: Json = False,
) -> None:
    """Keep the timings of a night, and hold them against the nights before: exit status 1 for a regression.

    Example: ./build.py night dist/nightly/2026-01-01T000000Z-cpu --name cpu
    """
    from kit.night import close_night, say_closed

    closed = close_night(name, folder, history or folder.parent / "history.jsonl", failed)
    _answer(closed.model_dump_json(indent=2), json)
    raise typer.Exit(say_closed(closed))


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash or zsh.")] = "bash") -> None:
    """Print the shell's completion of this command line.

    Example: eval "$(./build.py completion bash)"
    """
    from kit.errors import UsageError

    if shell not in ("bash", "zsh"):
        raise UsageError(f"no completion for '{shell}'", "choose bash or zsh")
    script = get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE, shell=shell)
    # Wherever the script was called from: the shell knows the path that was typed.
    print(script.replace(f"complete_zsh {PROGRAM})", 'complete_zsh "${words[1]}")'))


@app.command()
def doctor(
    profile: Profile = "cpu",
    json: Json = False,
) -> None:
    """Check this machine for the pipeline: tools, versions, disk, registry, GPUs, driver. Exit status 1 with a problem.

    \b
    Examples: ./build.py doctor
              ./build.py doctor --profile cuda --json
    """
    from kit.doctor import examine_host, say_findings

    findings = examine_host(profile)
    _answer(findings.model_dump_json(indent=2), json)
    raise typer.Exit(say_findings(findings))


def _answer(text: str, json: bool) -> None:
    if json:
        print(text)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    for number in INTERRUPTS:  # a second signal must not interrupt the clean-up
        signal.signal(number, lambda *_: None)
    raise Interrupted


def main() -> int:
    for number in INTERRUPTS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, and shells for what they start in the background
            signal.signal(number, _interrupt)
    command = typer.main.get_command(app)
    completion_init()
    try:
        status = command.main(standalone_mode=False, prog_name=PROGRAM, complete_var=COMPLETE)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except KitError as error:
        _complain(str(error))
        _debug_traceback()
        return error.status
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Interrupted, typer.Abort):
        _complain("interrupted; earlier artifacts are as they were")
        return 1
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        # `./build.py` alone raises its whole help text as the message.
        print(text, file=sys.stderr) if "\n" in text else _complain(f"{text} (see --help)")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        _complain(f"{error.strerror}: {error.filename}")
    else:
        _complain(f"{type(error).__name__}: {' '.join(str(error).split())} (a traceback comes with --debug)")
    _debug_traceback()
    return 1


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


def _debug_traceback() -> None:
    if os.environ.get("KIT_DEBUG"):
        import traceback

        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
