#!/usr/bin/env bash
# What ray.sub runs on the nodes, outside the container; it arrives as the text of `bash -c`, because a node may see none of
# our files.
#
#   check            check what the job needs here, and end
#   keep             the same; where the job needs a folder on this node's disk, make it, hold it to the end, remove it
#   enter ROLE       the container of the node, for the back ends that srun does not know
#   attach COMMAND…  a shell, or the command, in the container that is running here
set -euo pipefail
node=${SLURMD_NODENAME:-$(hostname -s)}
scratch=$JOB_SCRATCH

die() {
  echo "error: $node: $*" >&2
  exit 70
}

check() {
  check_shared
  check_container
  if [ "$CONTAINER_BACKEND" = runner ]; then
    new_python >/dev/null
    unshare --user --map-root-user --mount --pid --fork true ||
      die "user namespaces are not allowed here, which the runner needs: see docs/slurm.md"
  fi
}

keep() {
  remove_stale
  check
  if needs_scratch; then
    trap withdraw TERM INT
    make_scratch
    echo "$SLURM_STEP_ID" >"$JOB_FOLDER/keeper"
    touch "$JOB_FOLDER/kept/$node"
  fi
  {
    hostname -I 2>/dev/null || true
    [ -z "${INTERFACE:-}" ] || ip -4 -o address show dev "$INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}'
  } >"$JOB_FOLDER/nodes/.$node"
  mv "$JOB_FOLDER/nodes/.$node" "$JOB_FOLDER/nodes/$node"
  while [ -e "$scratch" ]; do
    sleep 3600 &
    wait $! || true
  done
}

# Else /tmp is a file system in memory, in the container's own mount namespace: nothing can be left of it.
needs_scratch() {
  [ -n "${SCRATCH:-}" ] || [ "$CONTAINER_BACKEND" = oci ] || { [ "$CONTAINER_BACKEND" = runner ] && runner_needs_state; }
}

# Root's containers are mounted on a folder; a user's need one where they cannot be mounted.
runner_needs_state() {
  [ "$(id -u)" = 0 ] || ! PYTHONPATH=$KIT PYTHONDONTWRITEBYTECODE=1 "$(new_python)" -c 'import sys, kit.rootless; sys.exit(kit.rootless.why_not_mounted() is not None)'
}

# Scratch of our earlier jobs whose keeper was killed: nobody holds its lock.
remove_stale() {
  local folder
  for folder in "$(dirname "$scratch")"/functional-*; do
    if [ -O "$folder" ] && [ -d "$folder" ] && [ ! -L "$folder" ]; then
      # shellcheck disable=SC2094  # the folder is only held open
      (flock --nonblock 9 && remove "$folder") 9<"$folder" 2>/dev/null || true
    fi
  done
}

make_scratch() {
  local new
  if [ -e "$scratch" ] || [ -L "$scratch" ]; then
    die "$scratch is there already: remove it, or set SCRATCH to another folder"
  fi
  new=$(dirname "$scratch")/.${scratch##*/}
  mkdir -m 700 "$new" || die "cannot make $new: set SCRATCH to a folder on each node's own disk"
  exec 9<"$new"
  flock 9
  mkdir -m 1777 "$new/tmp"
  mkdir "$new/kit"
  touch "$new/used"
  mv "$new" "$scratch"
  [ "$CONTAINER_BACKEND" != oci ] || make_bundle
}

# An OCI bundle holds an unpacked root: no runtime mounts a squashfs.
make_bundle() {
  local bundle=$scratch/kit/bundle said
  mkdir "$bundle"
  said=$(unsquashfs -no-progress -no-xattrs -dest "$bundle/rootfs" "$CONTAINER" 2>&1 >/dev/null) ||
    { remove "$scratch" && die "unsquashfs failed: ${said##*$'\n'}: is there room on the disk of $scratch?"; }
  python3 "$JOB_FOLDER/oci_config.py" "$bundle/rootfs" "$JOB_MOUNTS" >"$bundle/config.json" ||
    { remove "$scratch" && die "no OCI bundle could be made: is runc installed?"; }
}

check_shared() {
  local deadline=$((SECONDS + SHARED_DEADLINE_S))
  until ls "$JOB_FOLDER" >/dev/null 2>&1 && [ "$(cat "$JOB_FOLDER/canary" 2>/dev/null)" = "$JOB_CANARY" ]; do
    [ $SECONDS -lt $deadline ] ||
      die "does not see the job's files in $JOB_FOLDER within $SHARED_DEADLINE_S s: BASE_LOG_DIR must be on a file system that all nodes share"
    sleep 0.5
  done
}

check_container() {
  local mount mounts
  if [[ "$CONTAINER" == /* ]]; then
    [ -e "$CONTAINER" ] || die "there is no $CONTAINER here: CONTAINER must be on a file system that all nodes share"
    [ -r "$CONTAINER" ] || die "$CONTAINER cannot be read by $(id -un 2>/dev/null || id -u)"
  fi
  IFS=, read -ra mounts <<<"${MOUNTS:-}"
  for mount in "${mounts[@]}"; do
    [ -e "${mount%%:*}" ] || die "there is no ${mount%%:*} here, which MOUNTS names"
  done
}

# The container may still be ending. While it lives, its files stay: should we be killed, the next job removes them.
withdraw() {
  trap '' TERM INT
  flock "$scratch/used" true
  remove "$scratch"
  rm -f "$JOB_FOLDER/kept/$node"
  exit 0
}

# Without `return`: in a trap, bash 5.2 leaves the trap's own function with it.
remove() {
  local try
  for try in 1 2 3; do
    ! rm -rf "$1" 2>/dev/null || break
    chmod -R u+rwX "$1" 2>/dev/null || sleep "$try"
  done
  [ ! -e "$1" ] || echo "error: $node: cannot remove $1" >&2
}

enter() {
  if [ -e "$scratch" ]; then
    exec 8<"$scratch/used"
    flock --shared 8
  fi
  export KIT_STATE=$scratch/kit
  "enter_$CONTAINER_BACKEND" python3 "$JOB_FOLDER/ray_node.py" "$1" "$JOB_FOLDER"
}

enter_runner() {
  local options mount mounts
  mapfile -t options < <(of_the_step)
  IFS=, read -ra mounts <<<"$JOB_MOUNTS"
  for mount in "${mounts[@]}"; do
    options+=(--mount "$mount")
  done
  cd "$KIT" || die "cannot enter $KIT, the kit's folder: it must be on a file system that all nodes share"
  PYTHONDONTWRITEBYTECODE=1 exec "$(new_python)" -m kit.node_run --sqsh "$CONTAINER" "${options[@]}" -- "$@"
}

# Options that bring into the container what differs from step to step. Names alone: values would be there for all to see.
of_the_step() {
  compgen -e | sed -nE 's/^(SLURMD?_.*|CUDA_VISIBLE_DEVICES)$/--env\n\1/p'
}

new_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "the runner needs Python 3.11 or newer on each node: install it, or use another CONTAINER_BACKEND"
}

enter_enroot() {
  local options mount mounts
  mapfile -t options < <(of_the_step)
  IFS=, read -ra mounts <<<"$JOB_MOUNTS"
  for mount in "${mounts[@]}"; do
    options+=(--mount "${mount%:ro}:none:x-create=auto,rbind$([[ "$mount" != *:ro ]] || echo ,ro)")
  done
  export ENROOT_MOUNT_HOME=n
  exec enroot start --root --rw "${options[@]}" "$CONTAINER" "$@"
}

attach() {
  local pid
  for pid in $(pgrep -u "$(id -u)" -f "ray_node.py (head|worker) $JOB_FOLDER" | sort -rn); do
    [ "$(readlink "/proc/$pid/ns/mnt")" = "$(readlink /proc/self/ns/mnt)" ] || break
  done
  [ -n "${pid:-}" ] || die "no container of job $SLURM_JOB_ID is running here"
  # Only what is the container's own: of the node's namespaces, which pyxis and enroot keep, a user may enter none.
  local inside=(nsenter --target "$pid" --preserve-credentials) name
  for name in user mnt uts ipc pid; do
    [ "$(readlink "/proc/$pid/ns/$name")" = "$(readlink "/proc/self/ns/$name")" ] || inside+=("--${name/mnt/mount}")
  done
  # shellcheck disable=SC2016  # for the shell inside
  if [ $# -gt 0 ]; then
    exec "${inside[@]}" bash -c '. /tmp/functional/environment; exec "$@"' attach "$@"
  fi
  exec "${inside[@]}" bash --rcfile /tmp/functional/environment -i
}

"$@"
