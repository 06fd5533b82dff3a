#!/usr/bin/env bash
# One node of a Ray cluster, in the image: /shared is a folder that all nodes have; NODE_IP is this one's address.
#
#   node.sh NAME                     joins, and stays
#   node.sh NAME NODES COMMAND…      is the head; runs COMMAND once NODES nodes are there, and ends with its status
set -euo pipefail
name=$1
shift
hostname "$name"
export FUNCTIONAL_NODE_IP=$NODE_IP RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/shared/token
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=/src PYTHONDONTWRITEBYTECODE=1
cd /src
options=(--node-ip-address="$NODE_IP" --num-gpus=2 --num-cpus=2 --object-store-memory=200000000)
if [ $# = 0 ]; then
  exec ray start --address="$HEAD" --block "${options[@]}"
fi
nodes=$1
shift
ray start --head --port="${HEAD##*:}" --include-dashboard=false "${options[@]}"
python - "$HEAD" "$nodes" <<'PYTHON'
import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
ray.init(address=address, log_to_driver=False)
deadline = time.monotonic() + 90
while sum(node["Alive"] for node in ray.nodes()) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"error: {wanted} nodes were not there after 90 s")
    time.sleep(0.2)
PYTHON
export RAY_ADDRESS=$HEAD
status=0
"$@" || status=$?
python -c "import ray; ray.init(address='$HEAD'); assert sum(node['Alive'] for node in ray.nodes()) == $nodes"
exit $status
