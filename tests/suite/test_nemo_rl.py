"""NeMo RL as the driver of a run: where it is looked for, what its output says, what is checked, how a run ends.

The trees here are ours, of NeMo RL's layout, and so is their script: they show how runs end. That the words looked for
are NeMo RL's own, and what its script does, is seen where it is: `test_the_unmodified_script_without_a_gpu`, and
ci/gpu_nemo_rl.sh.
"""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.guard import descendants
from functional.suite.checklist import Checklist
from functional.suite.nemo_rl import launch
from functional.suite.nemo_rl.checks import (
    Events,
    check_end,
    check_generation_metrics,
    check_refits,
    check_steps,
    check_token_error,
    check_versions,
    steps_of,
)
from functional.suite.nemo_rl.launch import Ended, run_script, shared_gpu
from functional.suite.nemo_rl.log import FIRST_REFIT, INVALIDATED, NOT_INVALIDATED, REFIT, NemoRlLog
from functional.suite.nemo_rl.place import find_nemo_rl, find_recipe, tree_state
from functional.suite.reserve import RESERVE_BYTES
from tests.nemo_rl_tree import RECIPE, write_runnable_tree

SOURCE = """
import os, psutil, subprocess, sys, time
print("Applied CLI overrides")
print("words:", *sys.argv[1:])
print("the token is", os.environ.get("SOME_TOKEN"))
how = os.environ["HOW"]
if how == "raises":
    raise RuntimeError("no GPU here")
if how == "leaves":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if how == "leaves on a node":
    import ray
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, runtime_env={"env_vars": dict(os.environ)})
    @ray.remote(num_cpus=0)
    class Worker:
        def start(self):
            return os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    actor = Worker.remote()
    worker, left = ray.get(actor.start.remote())
    print("left is", left, flush=True)
    os.kill(worker, 9)
if how == "ends the cluster":
    port = int(os.environ["RAY_ADDRESS"].rpartition(":")[2])
    while any(s.laddr.port == port and s.status == "LISTEN" for s in psutil.net_connections("tcp")):
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "gcs_server" and any(s.laddr.port == port for s in process.net_connections()):
                process.kill()
        time.sleep(0.1)
if how == "hangs":
    time.sleep(600)
if how == "writes on":
    while True:
        print("x" * 4096)
if how == "leaves a writer":
    subprocess.Popen([sys.executable, "-uc", "import time; [(print('left'), time.sleep(0.1)) for _ in range(600)]"])
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A tree of NeMo RL's layout, and environments: this Python, and programs that do nothing."""
    tree = tmp_path / "tree"
    write_runnable_tree(tree, SOURCE)
    dynamo = tmp_path / "dynamo" / "bin"
    dynamo.mkdir(parents=True)
    (dynamo / "python").symlink_to(sys.executable)
    for name in ("etcd", "nats-server"):
        (dynamo / name).symlink_to("/bin/true")
    monkeypatch.setenv("NEMO_RL_DIR", str(tree))
    monkeypatch.setenv("NEMO_RL_VENV", sys.prefix)
    monkeypatch.setenv("NEMO_RL_DYNAMO_VENV_DIR", str(dynamo.parent))
    return tree


def test_what_is_missing_is_named(place, tmp_path, monkeypatch):
    assert find_nemo_rl().script == place / "examples/run_grpo.py"
    (tmp_path / "dynamo/bin/etcd").unlink()
    with pytest.raises(ConfigError, match=r"dynamo/bin/etcd is missing: NeMo RL starts Dynamo from there"):
        find_nemo_rl()
    monkeypatch.setenv("NEMO_RL_VENV", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"none/bin/python is missing: .*set NEMO_RL_VENV"):
        find_nemo_rl()
    (place / "examples/run_grpo.py").unlink()
    with pytest.raises(ConfigError, match=r"has no examples/run_grpo\.py"):
        find_nemo_rl()
    (place / "pyproject.toml").write_text('[project]\nname = "dynamo-rl-kit"\n')
    with pytest.raises(ConfigError, match="is not NeMo RL"):
        find_nemo_rl()
    monkeypatch.setenv("NEMO_RL_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere is missing: there is no NeMo RL here"):
        find_nemo_rl()


def test_a_recipe_is_found_here_or_in_the_tree(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path("recipe.yaml"), place) == place / "recipe.yaml"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert find_recipe(Path("recipe.yaml"), place) == tmp_path / "recipe.yaml"
    with pytest.raises(ConfigError, match=r"other\.yaml: no such file, neither here nor in"):
        find_recipe(Path("other.yaml"), place)


def test_commit_and_changes_of_a_checkout(place):
    assert tree_state(place) == (None, [])
    (place / ".commit").write_text("1234\n")
    assert tree_state(place) == ("1234", [])
    if shutil.which("git") is None:
        pytest.skip("no git here")
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True, stdin=subprocess.DEVNULL)
    commit, changed = tree_state(place)
    assert commit is not None
    assert (len(commit), changed) == (40, [])
    (place / "examples/run_grpo.py").write_text("print()")
    assert tree_state(place) == (commit, ["examples/run_grpo.py"])


def test_each_gpu_of_ray_is_the_first_one():
    assert shared_gpu(3) == {"CUDA_VISIBLE_DEVICES": "0,0,0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def heard(*lines):
    log = NemoRlLog()
    for seconds, line in enumerate(lines):
        log.feed(line, float(seconds))
    return log


ACTOR = "\x1b[36m(AsyncTrajectoryCollector pid=7, ip=10.0.0.1)\x1b[0m "


def good_log(steps=2):
    """Lines as NeMo RL's source prints them, written by hand."""
    lines = [f"✅ {FIRST_REFIT}"]
    for _ in range(steps):
        lines += [f"🔄 {REFIT}...", f"{ACTOR}✅ {INVALIDATED}"]
    return heard(*lines, "Max number of steps has been reached, stopping training early")


def failures(check, *arguments):
    checks = Checklist()
    check(checks, *arguments)
    return [found.name for found in checks.checks if not found.passed]


def test_refits_and_cache_invalidations_are_counted():
    assert failures(check_refits, good_log(), 2, True) == []
    assert failures(check_refits, good_log(), 3, True) == ["refit.one_a_step"]
    log = good_log()
    log.feed(f"🔄 {REFIT}...", 9.0)
    assert failures(check_refits, log, 3, True) == ["refit.one_cache_invalidation_each"]
    log.feed(f"{ACTOR}⚠️ {NOT_INVALIDATED[0]}: timed out", 9.0)
    log.feed(f"{ACTOR}✅ {INVALIDATED}", 9.0)
    assert failures(check_refits, log, 3, True) == ["refit.one_cache_invalidation_each"]
    assert failures(check_refits, log, 3, False) == [], "a recipe that keeps its caches is not asked for it"
    assert "refit.before_the_first_sample" in failures(check_refits, NemoRlLog(), 0, True)


def test_the_cause_is_the_error_within_rays_own():
    log = heard(
        "Traceback (most recent call last):",
        "ray.exceptions.ActorDiedError: The actor died: an error in its creation, \x1b[36mray::W\x1b[39m",
        '  File "worker.py", line 1, in __init__',
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "ray.exceptions.ActorDiedError: again",
    )
    assert log.cause == "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
    assert heard("❌ Policy generation refit failed: it hung").cause == "Policy generation refit failed: it hung"
    assert heard("all well: no Error here").cause is None


def test_an_end_that_was_not_good():
    checks = Checklist()
    assert check_end(checks, Ended(0, False, 9.0, []), good_log(), 60) is None
    for ended, log, words in (
        (
            Ended(1, False, 9.0, []),
            heard("Applied CLI overrides", "KeyError: 'x'"),
            "status 1 .*come to: recipe: KeyError",
        ),
        (Ended(-9, False, 9.0, []), NemoRlLog(), "ended by signal 9, having come to: start"),
        (Ended(-2, True, 9.0, []), good_log(), "was stopped after 60 s .*trained"),
        (
            Ended(0, False, 9.0, []),
            heard("❌ Policy generation refit failed: it hung"),
            "status 0 .*: Policy generation",
        ),
    ):
        why = check_end(checks, ended, log, 60)
        assert why is not None
        assert re.search(words, why), why
    assert [found.passed for found in checks.checks] == [True, False, False, False, False]


def listen(place, how, heard, deadline_s=60.0):
    return run_script(find_nemo_rl(), [], os.environ | {"HOW": how}, deadline_s, heard)


def test_what_cannot_be_heard_ends_the_script(place):
    lines = []

    def full(line):
        lines.append(line)
        if line.startswith("x"):
            raise OSError(errno.ENOSPC, "No space left on device")

    others, began = set(descendants(os.getpid())), time.monotonic()
    with pytest.raises(OSError, match="No space left on device"):
        listen(place, "writes on", full, deadline_s=600.0)
    assert time.monotonic() - began < launch.GRACE_S, "it waited for the deadline, or for a pipe that nobody reads"
    assert sum(line.startswith("x") for line in lines) == 1
    assert set(descendants(os.getpid())) <= others


def test_what_was_left_behind_is_heard_no_more(place, monkeypatch):
    monkeypatch.setattr(launch, "LAST_LINES_S", 1.0)
    lines = []
    ended = listen(place, "leaves a writer", lines.append)
    assert (ended.status, ended.is_late) == (0, False)
    heard, (left,) = len(lines), [pid for pid in psutil.pids() if "print('left')" in " ".join(cmdline(pid))]
    try:
        time.sleep(1.0)
        assert len(lines) == heard >= 3
    finally:
        os.kill(left, signal.SIGKILL)


def cmdline(pid):
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def events(errors, tags=("generation_metrics/kv_cache_usage_perc",)):
    points = [(step, value) for step, value in enumerate(errors, 1)]
    return Events({"train/token_mult_prob_error": points, "train/reward": points}, ["train/reward", *tags])


def test_metrics_are_judged():
    assert failures(check_token_error, events([1.01, 1.02]), 1.05) == []
    for bad in ([1.01, 1.05], [1.01, math.nan], []):
        assert failures(check_token_error, events(bad), 1.05) == ["tokens.token_mult_prob_error"]
    assert failures(check_steps, events([1.0, 1.0]), 2) == []
    assert failures(check_steps, events([1.0]), 2) == failures(check_steps, events([]), 2) == ["steps.all_made"]
    assert failures(check_generation_metrics, events([1.0])) == []
    assert failures(check_generation_metrics, events([1.0], ())) == ["telemetry.generation_metrics"]
    one = {"nvidia-nccl-cu13": "2.30.7"}
    assert failures(check_versions, {"trainer": one, "dynamo": one}) == []
    assert failures(check_versions, {"trainer": one, "dynamo": {}}) == ["versions.one_nccl"]
    assert failures(check_versions, {"trainer": {}, "dynamo": {}}) == ["versions.one_nccl"]


def test_tokens_that_the_trainer_would_cut_are_told():
    log = heard(
        "(DTensorPolicyWorker[rank=0] pid=7) [WARNING]: 8/512 valid tokens have -inf in prev_logprobs (mismatch).",
        "(DTensorPolicyWorker[rank=0] pid=7) [WARNING]: 4/128 valid tokens have -inf in curr_logprobs (mismatch).",
    )
    checks = Checklist()
    check_token_error(checks, events([1.98]), 1.05, log.filtered)
    assert "it counts 8 token(s) outside the trainer's top-k/top-p" in checks.checks[0].detail


def test_steps_of_the_report_have_its_metrics():
    found = steps_of(Events({"train/reward": [(1, 0.5)], "train/truncation_rate": [(1, 0.25)], "x": [(1, 1.0)]}, []), 4)
    assert [step.model_dump() for step in found] == [
        {"step": 1, "samples": 4, "truncated": 1, "mean_reward": 0.5, "reward": 0.5, "truncation_rate": 0.25}
    ]


def run(out, how, *words, recipe="recipe.yaml", **variables):
    command = [sys.executable, "-m", "functional.suite.cli", "run", "--driver", "nemo-rl", "--out", str(out), recipe]
    answer = subprocess.run(
        [*command, *words],
        env=os.environ | {"HOW": how} | variables,
        capture_output=True,
        text=True,
        timeout=400,
    )
    report = json.loads((out / "report.json").read_text()) if (out / "report.json").is_file() else None
    return answer, report


def outcome(report):
    return {check["name"]: check["passed"] for check in report["checks"]}


def test_bad_input_ends_in_one_line_before_anything_starts(place, tmp_path):
    pytest.importorskip("omegaconf")
    out = tmp_path / "out"
    for words, complaint in (
        (["policy.generation.backend=vllm"], "policy.generation.backend=vllm: this driver checks runs with dynamo"),
        (["logger.log_dir=x"], "logger.log_dir: set by --out; leave it out"),
        (["data.train.data_path=/nowhere.jsonl"], "data.train.data_path: /nowhere.jsonl: no such file"),
        (["cluster"], "'cluster': an override is key=value"),
    ):
        answer, report = run(out, "ends", *words)
        assert (answer.returncode, report) == (2, None)
        assert complaint in answer.stderr.splitlines()[-1]
        assert "Traceback" not in answer.stderr
    answer, report = run(out, "ends", RAY_ADDRESS="127.0.0.1:1")
    assert (answer.returncode, report) == (2, None)
    assert answer.stderr.splitlines()[-1].startswith("error: RAY_ADDRESS=127.0.0.1:1: cannot join (ConnectionRefused")


@pytest.mark.parametrize(("how", "cause"), [("raises", "RuntimeError: no GPU here"), ("ends", None)])
def test_a_run_that_fails_says_why(place, tmp_path, how, cause):
    pytest.importorskip("ray")
    answer, report = run(tmp_path / "out", how, "cluster.gpus_per_node=2", SOME_TOKEN="not-to-be-told")
    assert answer.returncode == 1, answer.stderr
    assert report["status"] == "failed"
    passed = outcome(report)
    assert passed["teardown.nothing_left"], report["checks"]
    assert not passed["steps.all_made"]
    assert (cause is None) == passed["run.ended_well"]
    assert cause is None or report["error"].endswith(f"having come to: recipe: {cause}")
    log = (tmp_path / "out/logs/run_grpo.log").read_text()
    assert "cluster.gpus_per_node=2" in log
    assert "not-to-be-told" not in log
    assert report["nemo_rl"]["reached"] == "recipe"
    assert "own script of a commit that is not known" in (tmp_path / "out/report.html").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a Ray head that no run started, as `ray.sub` leaves one."""
    pytest.importorskip("ray")
    with ray_head(tmp_path_factory.mktemp("cluster") / "ray.log") as address:
        yield address


@contextmanager
def ray_head(output):
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "HOW")}
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))  # its sockets' paths are bounded
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--num-cpus=4"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    with output.open("wb") as log:
        head = subprocess.Popen(command, env=environment | launch.SLOW_MACHINE, stdout=log, stderr=log)
    try:
        yield launch.await_head(head, folder / "ray_current_cluster", output)
    finally:
        below = descendants(head.pid)
        launch.stop(head, signal.SIGTERM, 20.0)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


def test_a_full_disk_ends_the_run_in_one_line(place, cluster, tmp_path):
    """A Ray head of the run's own would write to the same disk."""
    pytest.importorskip("omegaconf")
    small = tmp_path / "small"
    small.mkdir()
    size = f"size={RESERVE_BYTES + 2**20}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        answer, report = run(small / "out", "writes on", RAY_ADDRESS=cluster)
        log = (small / "out/logs/run_grpo.log").stat().st_size
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)
    assert answer.returncode == 1
    assert report["error"].startswith(f"{small}/out/logs/run_grpo.log: No space left on device, so the script was")
    assert "Traceback" not in answer.stderr
    assert outcome(report)["teardown.nothing_left"], report["checks"]
    assert log > 2**19


def test_what_the_script_leaves_is_found_and_ended(place, tmp_path):
    pytest.importorskip("ray")
    _, report = run(tmp_path / "out", "leaves")
    left = next(check for check in report["checks"] if check["name"] == "teardown.nothing_left")
    assert not left["passed"]
    assert "sleep 600" in left["detail"]
    pid = int(left["detail"].split("process ")[1].split(":")[0])
    assert not Path(f"/proc/{pid}").exists()


def test_what_is_left_on_a_node_of_another_cluster_is_found_and_ended(place, cluster, tmp_path):
    """Ray's actors are no descendants of a run that joins a cluster, and what they start outlives them when they are
    killed."""
    _, report = run(tmp_path / "out", "leaves on a node", RAY_ADDRESS=cluster)
    left = next(check for check in report["checks"] if check["name"] == "teardown.nothing_left")
    assert not left["passed"]
    pid = int((tmp_path / "out/logs/run_grpo.log").read_text().split("left is ")[1].split()[0])
    host = cluster.rpartition(":")[0]
    assert left["detail"] == f"after the script's end, on {host}: process {pid}: sleep 600"
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.full
def test_a_cluster_that_goes_away_while_the_script_runs(place, tmp_path):
    """What is on its nodes cannot be looked at, and so is not said to be gone."""
    pytest.importorskip("ray")
    with ray_head(tmp_path / "ray.log") as cluster:
        _, report = run(tmp_path / "out", "ends the cluster", RAY_ADDRESS=cluster)
    left = next(check for check in report["checks"] if check["name"] == "teardown.nothing_left")
    assert not left["passed"]
    assert left["detail"].startswith(f"RAY_ADDRESS={cluster}: cannot join (ConnectionRefusedError: ")


def test_a_run_that_hangs_is_stopped(place, tmp_path):
    pytest.importorskip("ray")
    _, report = run(tmp_path / "out", "hangs", "--deadline-s", "5")
    assert "was stopped after 5 s (--deadline-s), having come to: recipe" in report["error"]
    assert outcome(report)["teardown.nothing_left"]


def test_a_run_that_is_told_to_stop_reports(place, tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "functional.suite.cli",
        "run",
        "--driver",
        "nemo-rl",
        "--out",
        str(out),
        "recipe.yaml",
    ]
    process = subprocess.Popen(command, env=os.environ | {"HOW": "hangs"})
    deadline = time.monotonic() + 300
    log = out / "logs/run_grpo.log"
    while not (log.is_file() and "words:" in log.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 1
    report = json.loads((out / "report.json").read_text())
    assert report["error"] == "the run was told to stop"
    assert outcome(report)["teardown.nothing_left"]


@pytest.mark.full
def test_the_unmodified_script_without_a_gpu(tmp_path):
    """NeMo RL itself, up to the first thing that needs a GPU; no test where it is not."""
    try:
        place = find_nemo_rl()
    except ConfigError as missing:
        pytest.skip(str(missing))
    model = Path(__file__).parents[2] / "functional/suite/arithmetic_model"
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"input": f"{a}+1=", "output": str(a + 1)}) + "\n" for a in range(8)))
    words = [f"policy.model_name={model}", f"policy.tokenizer.name={model}", "data.train.dataset_name=ResponseDataset"]
    words += [f"+data.train.data_path={data}", "data.train.split_validation_size=0", "env.math.num_workers=1"]
    recipe = "examples/configs/grpo_math_1B_dynamo.yaml"
    answer, report = run(tmp_path / "out", "", *words, "--share-gpu", "--deadline-s", "300", recipe=recipe)
    assert answer.returncode == 1, answer.stderr
    assert "no GPUs found" in report["error"], report["error"]
    assert {"recipe", "cluster", "etcd", "nats"} <= report["phases"].keys()
    assert outcome(report)["teardown.nothing_left"], report["checks"]
    assert report["data"]["questions"] == 8
    assert report["nemo_rl"]["script_sha256"]
    assert place.script.is_file()
