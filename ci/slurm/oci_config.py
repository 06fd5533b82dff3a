"""Print the config.json of an OCI bundle for Slurm's --container, with the job's mounts, and complete its root.

    oci_config.py ROOTFS MOUNTS        SRC:DST[:ro], with commas

Runs on a node, with the Python that is there. It begins with what `runc spec --rootless` prints.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

QUOTED = r"^([\"'])(.*)\1$"

root, mounts = Path(sys.argv[1]), sys.argv[2].split(",")
with tempfile.TemporaryDirectory() as folder:
    subprocess.run(["runc", "spec", "--rootless", "--bundle", folder], check=True)
    config = json.loads(Path(folder, "config.json").read_text())

config["root"] = {"path": str(root), "readonly": False}
process = config["process"]
process |= {"terminal": False, "cwd": "/", "noNewPrivileges": False}
process.pop("rlimits", None)  # the job's own
# Root's own rights over files and processes; in a user namespace they are none outside it.
rights = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SYS_PTRACE")
kinds = ("bounding", "effective", "permitted", "inheritable")
process["capabilities"] = {kind: [f"CAP_{right}" for right in rights] for kind in kinds}

# Slurm gives the container the environment of the step, so the image's comes with the command: /start COMMAND…
lines = [line.strip() for line in (root / "etc/environment").read_text().splitlines()]
pairs = [line.partition("=") for line in lines if re.match(r"[A-Za-z_]\w*=", line)]
exports = ["export {}={}".format(name, shlex.quote(re.sub(QUOTED, r"\2", value))) for name, _, value in pairs]
script = ["#!/bin/sh", "export HOME=/root", *exports, 'exec /bin/sh /etc/rc "$@"']
(root / "start").write_text("\n".join(script) + "\n")

linux = config["linux"]
linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "network"]
linux["maskedPaths"], linux["readonlyPaths"] = [], []
linux.pop("resources", None)

replaced = ("/sys", "/dev/shm", "/sys/fs/cgroup")
config["mounts"] = [each for each in config["mounts"] if each["destination"] not in replaced]
in_memory = [("/dev/shm", "mode=1777"), ("/tmp", "mode=1777")]
config["mounts"] += [
    {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", mode]}
    for place, mode in in_memory
]
devices = [str(each) for each in Path("/dev").iterdir() if re.fullmatch(r"fuse|nvidia.*|gdrdrv|infiniband", each.name)]
binds = [f"{device}:{device}" for device in sorted(devices)]
binds += [f"{path}:{path}:ro" for path in ("/sys", "/etc/hosts", "/etc/resolv.conf") if Path(path).exists()]
for text in binds + [mount for mount in mounts if mount]:
    source, target, *flags = text.split(":")
    options = ["rbind", "ro" if "ro" in flags else "rw"]
    config["mounts"].append({"destination": target, "type": "none", "source": source, "options": options})
print(json.dumps(config, indent=1))
