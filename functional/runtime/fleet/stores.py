"""etcd and NATS JetStream of one run, open to those only who have its credentials, on loopback too."""

import json
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.errors import RunError
from functional.runtime.fleet.process import ManagedProcess
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.recipe.environment import LOOPBACK, NATS_USER, Credentials

SCRIPT = Path(__file__).with_name("certificates.py")
SCRIPT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Stores:
    """Where etcd and NATS listen, and by what they know the run's programs."""

    etcd_url: str
    nats_url: str
    credentials: Credentials


def make_credentials(settings: FleetSettings) -> Credentials:
    """New ones, also as files that only their owner can read: `secrets` in the run's folder."""
    folder = secrets_folder(settings)
    folder.mkdir(mode=0o700)
    addresses = dict.fromkeys((settings.address, LOOPBACK))
    command = [str(settings.programs.dynamo_python), "-I", str(SCRIPT), str(folder), *addresses]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no output"])[-1]
        raise RunError(f"{SCRIPT.name}, by {settings.programs.dynamo_python}, made no certificates: {last}") from error
    ca, certificate, key = ((folder / name).read_text(encoding="ascii") for name in ("ca.pem", "cert.pem", "key.pem"))
    return Credentials(ca, certificate, key, secrets.token_urlsafe(24))


def start_etcd(settings: FleetSettings, url: str, peer_url: str, environment: Mapping[str, str]) -> ManagedProcess:
    """etcd; clients and peers, of which it has none, show a certificate of the run's authority."""
    folder = secrets_folder(settings)
    command = [
        str(settings.programs.etcd),
        f"--data-dir={settings.run_dir / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
    ]
    for prefix in ("", "peer-"):
        command += [
            f"--{prefix}client-cert-auth",
            f"--{prefix}trusted-ca-file={folder / 'ca.pem'}",
            f"--{prefix}cert-file={folder / 'cert.pem'}",
            f"--{prefix}key-file={folder / 'key.pem'}",
        ]
    return ManagedProcess("etcd", command, settings.log_dir / "etcd.log", environment)


def start_nats(
    settings: FleetSettings, port: int, credentials: Credentials, environment: Mapping[str, str]
) -> ManagedProcess:
    """NATS with JetStream; its file of settings holds the password, so that no command line does."""
    settings_file = secrets_folder(settings) / "nats.conf"
    content = {
        "listen": f"{settings.address}:{port}",
        "jetstream": {"store_dir": str(settings.run_dir / "nats")},
        "authorization": {"user": NATS_USER, "password": credentials.password},
    }
    settings_file.touch(mode=0o600, exist_ok=False)
    settings_file.write_text(json.dumps(content), encoding="utf-8")
    command = [str(settings.programs.nats_server), "-c", str(settings_file)]
    return ManagedProcess("nats-server", command, settings.log_dir / "nats-server.log", environment)


def secrets_folder(settings: FleetSettings) -> Path:
    return settings.run_dir / "secrets"
