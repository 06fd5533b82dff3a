"""Another user of the node, who knows every port, gets nowhere at etcd and NATS, and reads no credentials."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from functional.runtime.fleet.fleet import Fleet
from functional.runtime.fleet.programs import find_programs
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.fleet.stores import secrets_folder
from functional.runtime.recipe.environment import inherited_environment
from functional.runtime.recipe.model import Recipe
from tests import strangers

NOBODY = 65534
SCRIPT = Path(strangers.__file__).read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")


@pytest.fixture
def started(tmp_path):
    """A fleet's etcd and NATS, and where they are."""
    policy = {"model_name": "tiny", "optimizer": {"lr": 0.1}, "generation": {}}
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
    settings = FleetSettings(
        namespace="ours",
        recipe=Recipe.model_validate({"policy": policy}),
        model_dir=Path("/models/tiny"),
        run_dir=tmp_path / "run",
        log_dir=tmp_path / "logs",
        programs=find_programs(),
    )
    fleet = Fleet(settings, [], print)
    try:
        yield fleet, fleet._start_stores(inherited_environment(), time.monotonic() + 60)
    finally:
        fleet.shutdown()


def as_nobody(script, *words):
    done = subprocess.run([sys.executable, "-c", script, *words], user=NOBODY, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_port_refuses_a_stranger(started):
    fleet, _ = started
    client, peer, nats = fleet.ports.given
    answers = [
        json.loads(line)
        for line in as_nobody(SCRIPT, *(f"127.0.0.1:{port}" for port in (client, peer, nats))).splitlines()
    ]
    assert [answer["refused"] for answer in answers] == [True, True, True], answers
    for answer in answers:  # none is there no more
        assert not any("ConnectionRefusedError" in outcome for outcome in answer["tries"].values()), answer
    assert "Authorization Violation" in answers[2]["tries"]["nats"]


def test_the_same_tries_get_an_answer_where_nothing_is_asked_for(tmp_path):
    """So the test above can fail: NATS as it comes."""
    nats = find_programs().nats_server
    with subprocess.Popen([nats, "-a", "127.0.0.1", "-p", "20007"], stderr=subprocess.DEVNULL) as open_to_all:
        try:
            deadline = time.monotonic() + 20
            while json.loads(as_nobody(SCRIPT, "127.0.0.1:20007"))["refused"]:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            open_to_all.terminate()


def test_credentials_are_in_files_of_their_owner_only_and_on_no_command_line(started):
    fleet, stores = started
    files = sorted(secrets_folder(fleet.settings).iterdir())
    assert [file.name for file in files] == ["ca.pem", "cert.pem", "key.pem", "nats.conf"]
    assert [oct(file.stat().st_mode & 0o777) for file in files] == ["0o600"] * 4
    words = [word for process in psutil.process_iter() for word in process.cmdline()]
    assert not [word for word in words if stores.credentials.password in word or "PRIVATE KEY" in word]
    assert stores.credentials.password not in repr(stores)
    assert "PRIVATE KEY" not in repr(stores)
    for log in fleet.settings.log_dir.iterdir():
        assert stores.credentials.password not in log.read_text()
