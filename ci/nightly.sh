#!/usr/bin/env bash
# A night: image, push, squashfs, the suite directly and through Slurm, longer matrices, verify; then the report, the
# record and the timings are published, and a time beyond the noise of the nights before fails it.
#
#   ci/nightly.sh [--profile cuda] [--name NAME] [--stages image,push,…] [--plain] [RECIPE] [key=value …]
#
# Stages, in this order: image push sqsh functional slurm matrices verify. RECIPE and key=value go to the suite. --plain
# runs `functional` and `matrices` alone, in plain environments instead of a release: PYTHON has the trainer's packages,
# DYNAMO_VENV, ETCD_BIN and NATS_SERVER_BIN name the rest (ci/gpu_run.sh makes such).
#
# PUBLISH (dist/nightly) takes a folder a night and history.jsonl, the timings of all of them. IMAGE is where the image is
# pushed (the kit's own registry if unset). SLURM: auto (if a controller answers here), always, never, or local: one of the
# kit's own for the job (ci/slurm/local.sh). GPUS (2) of a node for a job; SUBMIT: more options of ./build.py submit. MATRIX (ci/nightly-PROFILE.txt): a line of key=value a run, or of a fault
# case. PYTHON (.venv/bin/python) runs the kit; if it is set, the machine is taken as prepared.
#
# Secrets stay out of the log: values of variables whose names tell of one (TOKEN, SECRET, PASSWORD, KEY …) are replaced.
# Exit status: 0; 1 if a stage failed or a time regressed; 2 for bad usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(image push sqsh functional slurm matrices verify)
profile=cpu name="" stages="" plain="" words=()

main() {
  read_options "$@"
  local started night
  started=$(date -u +%Y-%m-%dT%H%M%SZ)
  night=${PUBLISH:-dist/nightly}/$started-$name
  mkdir -p "$night"
  status=0
  (carry_out "$night") 2>&1 | python3 ci/hide_secrets.py | tee "$night/nightly.log" || status=$?
  echo "night: ${night}"
  exit "$status"
}

read_options() {
  while [ $# -gt 0 ]; do
    case $1 in
      --profile) profile=${2:?--profile NAME} && shift 2 ;;
      --name) name=${2:?--name NAME} && shift 2 ;;
      --stages) stages=${2:?--stages A,B} && shift 2 ;;
      --plain) plain=true && shift ;;
      -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit 0 ;;
      -*) die "unknown option '$1': see ci/nightly.sh --help" ;;
      *) words+=("$1") && shift ;;
    esac
  done
  if [ -n "$plain" ]; then
    all=(functional matrices)
    [ -n "${PYTHON:-}" ] || die "--plain needs PYTHON: one with the trainer's packages"
  fi
  name=${name:-${plain:+plain-}$profile}
  IFS=, read -ra wanted <<<"${stages:-$(IFS=,; echo "${all[*]}")}"
  local stage
  for stage in "${wanted[@]}"; do
    [[ " ${all[*]} " == *" $stage "* ]] || die "there is no stage '$stage': choose of ${all[*]}"
  done
}

# Every stage that was asked for, up to the first that fails; then what there is is published, whatever failed.
carry_out() {
  local night=$1 stage failed=""
  prepare
  : >"$night/stages.tsv"
  for stage in "${all[@]}"; do
    [[ " ${wanted[*]} " == *" $stage "* ]] || continue
    if ! timed "$night" "$stage"; then
      failed=$stage
      break
    fi
  done
  publish "$night" "${failed:+failed}" || failed=${failed:-timings}
  if [ -z "${PYTHON:-}" ] && [ -z "${KEEP:-}" ]; then
    build --quiet services stop || true
  fi
  [ -z "$failed" ] || die1 "the night failed in '$failed'"
}

prepare() {
  [ -z "${PYTHON:-}" ] || return 0
  ci/bootstrap.sh --yes
  ci/python-env.sh
}

build() { "${PYTHON:-.venv/bin/python}" build.py "$@"; }

# timed NIGHT STAGE: status 3 of a stage means that it was left out
timed() {
  local started status=0
  started=$(date +%s.%N)
  echo "== $2"
  # A shell of its own: `set -e` does not hold in a function whose status is asked for.
  NIGHT=$1 PROFILE=$profile NAME=$name PLAIN=$plain "$BASH" ci/nightly.sh --only "$2" "${words[@]}" || status=$?
  printf '%s\t%s\t%s\n' "$2" "$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.2f", b - a }')" "$status" \
    >>"$1/stages.tsv"
  [ "$status" != 3 ] || return 0
  return "$status"
}

stage_image() { build image --name "$name" --profile "$profile"; }

stage_push() { build push --name "$name"; }

stage_sqsh() { build sqsh --name "$name"; }

stage_functional() {
  if [ -z "$plain" ]; then
    build functional --name "$name" "$@"
    return
  fi
  local recipe=recipes/grpo_cpu.yaml
  [ "$profile" = cpu ] || recipe=recipes/grpo_gpu.yaml
  [[ $# -eq 0 || "$1" == *=* ]] || { recipe=$1 && shift; }
  in_place run "$recipe" "$@" --out "$(realpath "$night")/functional"
}

# The image's command line with this tree's code, from the folder in which recipes are named as in the image.
in_place() {
  local python
  python=$(realpath -s "$(command -v "$PYTHON")")
  (cd functional && PYTHONPATH=$OLDPWD${PYTHONPATH:+:$PYTHONPATH} "$python" -m functional.suite.cli "$@" </dev/null)
}

# The same suite as a job. The direct run's result stays the recorded one if no Slurm is here.
stage_slurm() {
  local more=()
  read -ra more <<<"${SUBMIT:-}"
  set -- submit --name "$name" --gpus "${GPUS:-2}" "${more[@]}" "$@"
  case ${SLURM:-auto} in
    always) build "$@" ;;
    local) on_a_local_slurm "$@" ;;
    auto | never)
      if [ "${SLURM:-auto}" = never ] || ! timeout 20 sinfo >/dev/null 2>&1; then
        echo "left out: no Slurm answers here (SLURM=${SLURM:-auto})"
        return 3
      fi
      build "$@"
      ;;
    *) die "SLURM='$SLURM' is unknown: auto, always, never or local" ;;
  esac
}

# One node, whose GPUs are devices in name alone. The job is an ordinary user's, who has a copy of the kit with this
# release; its result is then taken into the record here.
on_a_local_slurm() {
  local site
  ci/bootstrap.sh --yes --slurm
  state=$(realpath -m "${KIT_STATE:-.state}")/night # not local: the trap needs it when this function is over
  local_slurm() { KIT_STATE=$state ci/slurm/local.sh "$@"; }
  local_slurm down
  local_slurm up 1 "${GPUS:-2}"
  trap 'local_slurm down' EXIT
  site=$("${PYTHON:-.venv/bin/python}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  copy_for_alice "$state/slurm/shared/alice/kit"
  local_slurm run -u alice env --chdir=/srv/alice/kit KIT_NO_VENV=1 PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 \
    OBJECT_STORE_BYTES=100000000 python3 build.py "$@" --backend runner
  build functional --name "$name" --from "$state/slurm/shared/alice/kit/dist/$name"
}

copy_for_alice() {
  mkdir -p "$1/dist/$name"
  cp -r build.py kit sqsh ci "$1/"
  ln -s ci/slurm/ray.sub "$1/ray.sub"
  cp "dist/$name/record.json" "$1/dist/$name/"
  chown -R 30001:30001 "$1" # as ci/slurm/local.sh numbers her; the squashfs stays root's, for her to read
  ln "dist/$name/$name.sqsh" "$1/dist/$name/" 2>/dev/null || cp "dist/$name/$name.sqsh" "$1/dist/$name/"
}

# Runs that are not recorded: each line of the matrix in the squashfs, its report kept with the night.
stage_matrices() {
  local matrix=${MATRIX:-ci/nightly-$profile.txt} number=0 line settings failed=0
  [ -r "$matrix" ] || die "no matrix $matrix: set MATRIX"
  while read -r line; do
    [ -n "${line%%#*}" ] || continue
    number=$((number + 1))
    read -ra settings <<<"$line"
    echo "-- $line"
    mkdir -p "$night/matrix/$number"
    one_of_the_matrix "$(realpath "$night")/matrix/$number" "${settings[@]}" || failed=$((failed + 1))
    echo "$line" >"$night/matrix/$number/settings" # a fault case empties its folder first
  done <"$matrix"
  [ "$failed" = 0 ] || die1 "$failed of $number runs of the matrix failed"
}

# one_of_the_matrix FOLDER WORD…
one_of_the_matrix() {
  if [ -n "$plain" ]; then
    in_place "${@:2}" --out "$1"
  else
    build run --name "$name" --network none --mount "$1:/out" -- functional "${@:2}" --out /out </dev/null
  fi
}

stage_verify() { build verify "$name"; }

# publish NIGHT STATUS
publish() {
  local file release=dist/$name results=dist/$name/functional
  [ -z "$plain" ] || results=$1/functional
  for file in "$release"/record.json "$results"/{report.json,report.html,report.md,junit.xml}; do
    [ ! -e "$file" ] || cp "$file" "$1/"
  done
  local slower=0
  build night "$1" --name "$name" ${2:+--failed} || slower=$?
  if [ -e "$release/record.json" ]; then
    build report "$name" --history "$(dirname "$1")/history.jsonl" >"$1/release.txt"
    cp "$release/report.html" "$1/release.html"
  fi
  return "$slower"
}

die1() {
  echo "error: $*" >&2
  exit 1
}

die() {
  echo "error: $*" >&2
  exit 2
}

if [ "${1:-}" = --only ]; then
  profile=${PROFILE:?} name=${NAME:?} night=${NIGHT:?} plain=${PLAIN:-}
  "stage_$2" "${@:3}"
else
  main "$@"
fi
