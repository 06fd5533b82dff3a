#!/usr/bin/env bash
# Prove a release on a GPU machine without a network: carry its squashfs there in parts, run the suite in it, and bring
# the report into the record here.
#
#   ci/gpu_release.sh pack           here: dist/NAME as parts of 60 MB: .carry/part000, part001, …; their number
#   ci/gpu_release.sh take FOLDER    there, for each part in any order: checks it and keeps it in STORE
#   ci/gpu_release.sh run [WORD …]   there: joins the parts, checks the sum, runs ./build.py functional WORD …;
#                                    OUT/release.tgz takes the record, the report and the logs
#   ci/gpu_release.sh night [WORD …]  there: joins the parts, then ci/nightly.sh as far as it goes there; OUT/night.tgz
#   ci/gpu_release.sh bring FILE     here: puts a release.tgz into the record of dist/NAME
#
# NAME (cuda-trixie) is the release; CARRY (.carry) and PART_BYTES (60000000) say where parts go and how large they are;
# STORE (~/dynamo-rl-release) keeps them there; DEADLINE_S (540) bounds the run; PYTHON (python3) is the one there, of
# version THEIR_PYTHON (3.12).
# Each step may be repeated. Exit status: that of ./build.py functional; 2 for parts that are missing or damaged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${NAME:-cuda-trixie}
carry=${CARRY:-.carry}
part_bytes=${PART_BYTES:-60000000}
store=${STORE:-$HOME/dynamo-rl-release}
release=dist/$name
python=${PYTHON:-python3}

main() {
  case ${1:-} in
  pack) pack ;;
  take) take "${2:?name the folder of a part}" ;;
  run) run "${@:2}" ;;
  night) night "${@:2}" ;;
  bring) .venv/bin/python build.py functional --name "$name" --from "${2:?name a release.tgz}" ;;
  *) die "choose pack, take FOLDER, run, night or bring FILE" ;;
  esac
}

pack() {
  [ -e "$release/$name.sqsh" ] || die "no squashfs at $release/$name.sqsh: make it first: make image sqsh NAME=$name"
  rm -rf "$carry"/part*
  mkdir -p "$carry"
  split --bytes="$part_bytes" --numeric-suffixes=1 --suffix-length=3 "$release/$name.sqsh" "$carry/part"
  local part
  for part in "$carry"/part*; do
    mv "$part" "$part.bytes"
    mkdir "$part"
    mv "$part.bytes" "$part/${part##*/}"
    (cd "$part" && sha256sum "${part##*/}" >"${part##*/}.sha256")
  done
  mkdir "$carry/part000"
  cat "$carry"/part*/*.sha256 >"$carry/part000/parts.sha256"
  cp "$release/record.json" "$carry/part000/"
  pack_kit "$carry/part000"
  (cd "$carry/part000" && sha256sum -- * >part000.sha256)
  find "$carry" -maxdepth 1 -name 'part???' | wc -l
}

# What ./build.py needs there beside a Python.
pack_kit() {
  local site
  site=$(mktemp -d)
  awk -v tools='^(pip|mypy|ruff|hypothesis|pytest|import-linter|grimp|librt)' \
    '/^[a-zA-Z0-9]/ { keep = $0 !~ tools } keep' lockfiles/kit.txt >"$site.txt"
  "${UV:-.state/uv/bin/uv}" pip install --quiet --target "$site" --no-deps --require-hashes --only-binary :all: \
    --python-version "${THEIR_PYTHON:-3.12}" --python-platform x86_64-manylinux_2_28 --requirement "$site.txt"
  tar czf "$1/kit.tgz" -C "$site" .
  rm -rf "$site" "$site.txt"
}

take() {
  local part=${1##*/}
  (cd "$1" && sha256sum --check --quiet "$part.sha256") || die "$1 is damaged: carry it again"
  mkdir -p "$store/parts"
  local file
  for file in "$1"/*; do
    cp "$file" "$store/parts/.${file##*/}"
    mv "$store/parts/.${file##*/}" "$store/parts/${file##*/}"
  done
  echo "took $part: $(find "$store/parts" -name 'part???' | wc -l) parts, $(du -sm "$store/parts" | cut -f1) MB"
}

run() {
  join
  local status=0 out=${OUT:-$PWD/gpu-out}
  export PYTHONPATH=$store/kit
  timeout --kill-after=60 "${DEADLINE_S:-540}" "$python" build.py functional --name "$name" --engine own "$@" || status=$?
  mkdir -p "$out"
  tar czf "$out/release.tgz" --ignore-failed-read --exclude="$name.sqsh" -C "$release" .
  return "$status"
}

# The stages that a machine without an engine and a registry can carry out.
night() {
  join
  local status=0 out=${OUT:-$PWD/gpu-out}
  mkdir -p "$out"
  PYTHONPATH=$store/kit PYTHON=$python PUBLISH=$store/nightly SLURM=never timeout --kill-after=60 "${DEADLINE_S:-540}" \
    ci/nightly.sh --profile "${PROFILE:-$name}" --name "$name" --stages "${STAGES:-functional,matrices}" "$@" || status=$?
  tar czf "$out/night.tgz" -C "$store" nightly
  tar czf "$out/release.tgz" --ignore-failed-read --exclude="$name.sqsh" -C "$release" .
  return "$status"
}

# The squashfs in dist/, with the record that was carried; ./build.py checks the one against the other.
join() {
  local want missing
  [ -e "$store/parts/parts.sha256" ] || die "part000 is not in $store: carry it"
  if [ ! -e "$store/kit" ]; then
    mkdir "$store/kit.part"
    tar xzf "$store/parts/kit.tgz" -C "$store/kit.part"
    mv "$store/kit.part" "$store/kit"
  fi
  mkdir -p "$release"
  if [ ! -e "$store/joined.sqsh" ]; then
    missing=$(cut -c67- "$store/parts/parts.sha256" | while read -r part; do [ -e "$store/parts/$part" ] || echo "$part"; done)
    [ -z "$missing" ] || die "not in $store: $(xargs <<<"$missing"): carry them"
    cat "$store"/parts/part??? >"$store/joined.part"
    want=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["sqsh"]["sha256"])' "$store/parts/record.json")
    [ "$(sha256sum <"$store/joined.part")" = "$want  -" ] || die "the parts in $store do not make the recorded squashfs: pack and carry them again"
    mv "$store/joined.part" "$store/joined.sqsh"
    rm "$store"/parts/part???
  fi
  ln -sf "$store/joined.sqsh" "$release/$name.sqsh"
  [ -e "$release/record.json" ] || cp "$store/parts/record.json" "$release/"
}

die() {
  echo "error: $*" >&2
  exit 2
}

main "$@"
