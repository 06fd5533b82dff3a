#!/usr/bin/env bash
# The whole pipeline on this machine: bootstrap, environment, image, registry, squashfs, suite, and each digest compared.
# KEEP=1 leaves the registry and the engine running.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${NAME:-${PROFILE:-cpu}}
started=$SECONDS
[ "$(id -u)" = 0 ] || {
  echo "error: the demo needs root, for Docker's engine, the base and the container: run it as root" >&2
  exit 2
}

free_kb() { df --output=avail -k . | tail -1; }

# The lowest free space while we run; other programs on this disk count too, so it is an upper bound.
free_at_start=$(free_kb)
mkdir -p .state
lowest=.state/demo-lowest-free
echo "$free_at_start" >"$lowest"
(
  while sleep 2; do
    now=$(free_kb)
    [ "$now" -ge "$(cat "$lowest")" ] || echo "$now" >"$lowest"
  done
) &
watcher=$!

finish() {
  kill "$watcher" 2>/dev/null || true
  if [ -z "${KEEP:-}" ] && [ -x .venv/bin/python ]; then
    .venv/bin/python build.py --quiet services stop || true
  fi
}
trap finish EXIT
trap 'exit 1' INT TERM

ci/bootstrap.sh --yes
ci/python-env.sh
build() { .venv/bin/python build.py "$@"; }

build image --name "$name" --lean
build push --name "$name"
reference=$(.venv/bin/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["push"]["reference"])' "dist/$name/record.json")
there=$(skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://$reference")
grep -q "\"$there\"" "dist/$name/record.json" || {
  echo "error: $reference answers $there, which is not in dist/$name/record.json" >&2
  exit 1
}
echo "skopeo inspect $reference: $there, as recorded"
build sqsh --name "$name"
build functional --name "$name"
build verify "$name"

used=$(((free_at_start - $(cat "$lowest")) / 1000000))
minutes=$(((SECONDS - started) / 60)) seconds=$(((SECONDS - started) % 60))
echo "demo: green after $minutes min $seconds s; peak extra disk $used GB; the results are in dist/$name/functional"
