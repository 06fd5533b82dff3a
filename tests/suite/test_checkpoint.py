"""Checkpoints of the trainer: whole or not there; a run that goes on from one is as one that was not interrupted."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.model import CheckpointConfig, LossConfig, OptimizerConfig, SchedulerConfig
from functional.suite.checkpoint import INFO, Checkpoints, TrainingInfo, read_tensors, write_checkpoint
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.policy import Policy, Sample, collate

LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}}
SCHEDULER = SchedulerConfig.model_validate({"stages": [LINEAR]})
BATCH = collate([Sample((3, 4), (5, 6), (-1.0, -2.0), 1.0), Sample((4, 3), (6, 7, 8), (-1.0, -2.0, -0.5), -1.0)])


def info(step, **metrics):
    return TrainingInfo(
        step=step, seed=42, model_name="m", optimizer="adamw", engines_started=1, metrics=metrics, optimizer_steps=step
    )


def policy(name):
    return Policy(ARITHMETIC_DIR, optimizer=OptimizerConfig(name=name, lr=1e-3, momentum=0.9), scheduler=SCHEDULER)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_resumed_policy_goes_on_as_the_one_that_was_not_interrupted(tmp_path, name):
    whole, first, second = policy(name), policy(name), policy(name)
    for one in (whole, first):
        one.train_step(BATCH, LossConfig())
    write_checkpoint(tmp_path / "step_1", info(1), *first.checkpoint())
    second.resume(*read_tensors(tmp_path / "step_1"), TrainingInfo.of(tmp_path / "step_1").optimizer_steps)
    expected, found = whole.train_step(BATCH, LossConfig()), second.train_step(BATCH, LossConfig())
    assert found == expected
    assert found["lr"] > 1e-4
    for key, master in whole.master.items():
        assert torch.equal(second.master[key], master)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed():
    one = policy("sgd")
    before = one.snapshot()
    weights, state = one.checkpoint()
    weights.pop(next(iter(weights)))
    with pytest.raises(ValueError, match="another model"):
        one.resume(weights, state, 1)
    assert all(torch.equal(before[key], tensor) for key, tensor in one.snapshot().items())


WRITER = """
import sys, torch
from pathlib import Path
from functional.suite.checkpoint import TrainingInfo, write_checkpoint
folder = Path(sys.argv[1])
for step in range(1, 10_000):
    tensors = {name: torch.full((20_000,), float(step)) for name in "abc"}
    info = TrainingInfo(step=step, seed=1, model_name="m", optimizer="sgd", engines_started=1)
    write_checkpoint(folder / f"step_{step}", info, tensors, tensors)
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.007, 0.013, 0.029, 0.051])
def test_killed_at_any_moment_the_last_whole_one_is_there(tmp_path, delay_s):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        process.stdout.readline()
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    said = [int(line) for line in process.communicate()[0].split()]
    newest = Checkpoints(CheckpointConfig(enabled=True), tmp_path).newest()
    step = TrainingInfo.of(newest).step
    assert step >= (said or [3])[-1]
    for tensors in read_tensors(newest):
        assert {name: tensor.unique().tolist() for name, tensor in tensors.items()} == {n: [step] for n in "abc"}
    assert all(path.name.startswith("step_") for path in tmp_path.iterdir()), "what was left unfinished is gone"


def test_the_newest_and_the_best_by_the_metric_are_kept(tmp_path):
    config = CheckpointConfig(enabled=True, keep_top_k=2, metric_name="val:accuracy")
    checkpoints = Checkpoints(config, tmp_path)
    for step, accuracy in enumerate((0.9, 0.1, 0.8, 0.2), 1):
        write_checkpoint(checkpoints.path(step), info(step, **{"val:accuracy": accuracy}), {"a": torch.ones(1)}, {})
        checkpoints.prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3", "step_4"]
    assert checkpoints.newest() == tmp_path / "step_4"


def test_one_is_due_at_each_period_and_at_the_end(tmp_path):
    checkpoints = Checkpoints(CheckpointConfig(enabled=True, save_period=3), tmp_path)
    assert [step for step in range(1, 9) if checkpoints.is_due(step, 8)] == [3, 6, 8]
    assert not Checkpoints(CheckpointConfig(), tmp_path).is_due(3, 8)


def test_what_cannot_be_read_is_said(tmp_path):
    (tmp_path / INFO).write_text("{}")
    with pytest.raises(ConfigError, match="no checkpoint that can be read"):
        TrainingInfo.of(tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        read_tensors(tmp_path)
