#!/usr/bin/env bash
# A real Slurm on this machine, without systemd: a login node that also runs the controller, and N nodes, each in network,
# host name, mount, process and cgroup namespaces of its own. As root.
#
#   ci/slurm/local.sh up [NODES [GPUS]]       2 nodes with 2 GPUs each; waits until all are idle
#   ci/slurm/local.sh run [-n NODE] [-u USER] COMMAND…   on the login node, as root, unless told otherwise
#   ci/slurm/local.sh fail NODE               the node dies at once, as if its power were cut
#   ci/slurm/local.sh start NODE              and comes back
#   ci/slurm/local.sh down                    ends all of it; nothing is left
#
# What its nodes see: this machine's files; at /srv a folder that all share, with this repository at /srv/kit; a /tmp, a
# /run and a /dev of their own; the users alice and mallory, whose home folders they cannot write. Fake GPUs are devices
# that behave like /dev/null. The login node is the default route of the others, as nodes have one, and leads nowhere.
# Nothing of it is visible on the machine: the bridge between the nodes is in the login node's network namespace, and all
# processes and mounts end with the namespaces.
set -euo pipefail
repo=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
state=$(realpath -m "${KIT_STATE:-$repo/.state}")/slurm
self=$repo/ci/slurm/local.sh
network=10.0.0 # inside the namespaces only
cgroup=kit-slurm-$(cksum <<<"$state" | cut -d' ' -f1)
freezer=/sys/fs/cgroup/freezer
nodes_max=200

die() {
  echo "error: $*" >&2
  exit 2
}

up() {
  local nodes=${1:-2} gpus=${2:-2} node
  [[ "$nodes" =~ ^[0-9]+$ && "$nodes" -ge 1 && "$nodes" -le $nodes_max ]] || die "'$nodes' nodes: 1 to $nodes_max"
  [[ "$gpus" =~ ^[0-9]+$ ]] || die "'$gpus' GPUs: a number"
  [ ! -e "$state/nodes" ] || die "a cluster is already here ($state): ci/slurm/local.sh down"
  "$repo/ci/bootstrap.sh" --slurm
  mkdir -p "$state"/{etc,run,log,shared,pid}
  chmod 1777 "$state/shared"
  trap 'down' EXIT
  seq -f 'node%.0f' "$nodes" >"$state/nodes"
  write_configuration "$gpus"
  start login
  while read -r node; do
    start "$node"
  done <"$state/nodes"
  wait_for "idle nodes" all_idle
  trap - EXIT
  echo "Slurm is up: $nodes nodes with $gpus GPUs each; 'ci/slurm/local.sh run -u alice sinfo' shows it"
}

write_configuration() {
  local tracking=proctrack/linuxproc count name runc
  count=$(wc -l <"$state/nodes")
  if [ -d $freezer ]; then
    tracking=proctrack/cgroup
  else
    echo "note: no freezer cgroup here: steps are tracked by parents, and what leaves its parent outlives them" >&2
  fi
  cat >"$state/etc/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=login($network.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/slurm/munge.socket
StateSaveLocation=/run/slurm/state
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SlurmdLogFile=$state/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=$tracking
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=15
MinJobAge=86400
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
NodeName=node[1-$count] CPUs=4 RealMemory=$(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo)$([ "$1" = 0 ] || echo " Gres=gpu:$1")
PartitionName=local Nodes=ALL Default=YES MaxTime=4:00:00 DefaultTime=30
CONF
  cat >"$state/etc/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CONF
  # As Slurm's documentation has it for users without root.
  runc="runc --rootless=true --root=/run/user/runc"
  cat >"$state/etc/oci.conf" <<CONF
RunTimeQuery="$runc state %n.%u.%j.%s.%t"
RunTimeKill="$runc kill -a %n.%u.%j.%s.%t"
RunTimeDelete="$runc delete --force %n.%u.%j.%s.%t"
RunTimeRun="$runc run %n.%u.%j.%s.%t -b %b"
CONF
  : >"$state/etc/gres.conf"
  if [ "$1" != 0 ]; then
    echo "Name=gpu File=/dev/nvidia$([ "$1" = 1 ] && echo 0 || echo "[0-$(($1 - 1))]")" >"$state/etc/gres.conf"
  fi
  echo "$1" >"$state/gpus"
  {
    echo "127.0.0.1 localhost"
    echo "$network.254 login"
    awk -v net="$network" '{print net "." NR, $1}' "$state/nodes"
  } >"$state/etc/hosts"
  cp /etc/passwd /etc/group "$state/etc/"
  for name in alice:30001 mallory:30002; do
    echo "${name%:*}:x:${name#*:}:${name#*:}::/home/${name%:*}:/bin/bash" >>"$state/etc/passwd"
    echo "${name%:*}:x:${name#*:}:" >>"$state/etc/group"
  done
  dd if=/dev/urandom of="$state/etc/munge.key" bs=128 count=1 status=none
  chmod 400 "$state/etc/munge.key"
}

# start NAME: the namespaces of one machine, and its daemons in them
start() {
  local name=$1 number address
  grep -qx "$name" <(echo login && cat "$state/nodes") || die "there is no node '$name'"
  ! lives "$name" || die "$name is running"
  mkdir -p "$state/$name"/{tmp,run}
  chmod 1777 "$state/$name/tmp"
  if [ -d $freezer ]; then
    mkdir -p "$freezer/$cgroup/$name"
  fi
  setsid "$BASH" "$self" namespaces "$name" <"/dev/null" >"$state/log/$name.log" 2>&1 &
  echo $! >"$state/pid/$name"
  wait_for "$name: namespaces" first_process "$name"
  if [ "$name" = login ]; then
    address=$network.254
  else
    number=${name#node}
    address=$network.$number
    nsenter --net --target "$(first_process login)" -- \
      ip link add "$name" type veth peer name eth0 netns "$(first_process "$name")"
    nsenter --net --target "$(first_process login)" -- ip link set "$name" master bridge up
    nsenter --net --target "$(first_process "$name")" -- ip address add "$address/24" dev eth0
    nsenter --net --target "$(first_process "$name")" -- ip link set eth0 up
    nsenter --net --target "$(first_process "$name")" -- ip route add default via "$network.254"
  fi
  wait_for "$name: its daemons" test -e "$state/$name/run/ready"
}

# Host process ID of NAME's first process; fails while there is none.
first_process() {
  local children
  lives "$1" || return 1
  children=$(cat "/proc/$(cat "$state/pid/$1")/task/$(cat "$state/pid/$1")/children") && [ -n "$children" ] && echo "${children%% *}"
}

lives() {
  local pid
  pid=$(cat "$state/pid/$1" 2>/dev/null) && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "^unshare .* $self machine $1"
}

# In a process of its own: enter NAME's cgroup first, so that its cgroup namespace begins there.
namespaces() {
  if [ -d $freezer ]; then
    echo $$ >"$freezer/$cgroup/$1/cgroup.procs"
  fi
  exec unshare --mount --uts --net --pid --ipc --cgroup --fork --kill-child --mount-proc "$BASH" "$self" machine "$1"
}

# The first process of NAME's namespaces.
machine() {
  local name=$1
  hostname "$name"
  mounts "$name"
  ip link set lo up
  export SLURM_CONF=/run/slurm/etc/slurm.conf
  if [ "$name" = login ]; then
    ip link add bridge type bridge
    ip address add "$network.254/24" dev bridge
    ip link set bridge up
    sysctl -qw net.ipv4.ip_forward=1
    mkdir -p /run/slurm/state
    munged --foreground --force --key-file=/run/slurm/etc/munge.key --socket=/run/slurm/munge.socket \
      --pid-file=/run/slurm/munged.pid --seed-file=/run/slurm/munge.seed --log-file="$state/log/munged.log" &
    wait_for munged test -S /run/slurm/munge.socket
    slurmctld -D &
  else
    wait_for "address of $name" has_address
    slurmd -D -N "$name" &
  fi
  touch "$state/$name/run/ready"
  wait -n # bash reaps what else ends here, as a first process must
  echo "error: a daemon of $name has ended" >&2
}

has_address() {
  ip -4 -o address show dev eth0 2>/dev/null | grep -q inet
}

mounts() {
  local name=$1 device controller
  mount --make-rprivate /
  # The repository first: the mounts that follow may cover it.
  mkdir -p "$state/shared/kit"
  mount --bind "$repo" "$state/shared/kit"
  mount --rbind "$state/shared" /srv
  mount --bind "$state/etc/passwd" /etc/passwd
  mount --bind "$state/etc/group" /etc/group
  mount --bind "$state/etc/hosts" /etc/hosts
  mount -t tmpfs -o mode=755 tmpfs /home
  mkdir /home/alice /home/mallory
  mkdir -p "$state/dev/$name"
  mount -t tmpfs -o mode=755 tmpfs "$state/dev/$name"
  cp -a /dev/{null,zero,full,random,urandom,tty} "$state/dev/$name/"
  mknod -m 666 "$state/dev/$name/fuse" c 10 229
  mkdir "$state/dev/$name"/{pts,shm}
  for device in $(seq 0 $(($(cat "$state/gpus") - 1))); do
    mknod -m 666 "$state/dev/$name/nvidia$device" c 1 3
  done
  mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$state/dev/$name/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$state/dev/$name/shm"
  ln -s pts/ptmx "$state/dev/$name/ptmx"
  ln -s /proc/self/fd "$state/dev/$name/fd"
  for device in stdin:0 stdout:1 stderr:2; do
    ln -s "fd/${device#*:}" "$state/dev/$name/${device%:*}"
  done
  mount --rbind "$state/dev/$name" /dev
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir -p /run/slurm /run/slurmd /run/user
  mkdir -m 1777 /run/user/runc # Slurm 22.05 cannot put the user into the path
  mount --bind "$state/run" /run/slurm
  mkdir -p /run/slurm/etc
  mount --bind "$state/etc" /run/slurm/etc
  if [ -d $freezer ]; then
    umount --recursive /sys/fs/cgroup # programs read in mountinfo what is covered, too
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    for controller in $(tail -n +2 /proc/cgroups | cut -f1); do
      mkdir "/sys/fs/cgroup/$controller"
      mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller" || rmdir "/sys/fs/cgroup/$controller"
    done
  fi
  mount --bind "$state/$name/tmp" /tmp
}

all_idle() {
  [ "$(run sinfo --noheader --Node --states=idle --format=%N | sort -u | wc -l)" = "$(wc -l <"$state/nodes")" ]
}

# wait_for WHAT COMMAND…: until it succeeds, with a deadline
wait_for() {
  local deadline=$((SECONDS + 30))
  until "${@:2}" >/dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || die "$1 did not come within 30 s: see $state/log"
    sleep 0.1
  done
}

run() {
  local node=login user=root option
  while getopts n:u: option; do
    case $option in
      n) node=$OPTARG ;;
      u) user=$OPTARG ;;
      *) die "usage: ci/slurm/local.sh run [-n NODE] [-u USER] COMMAND…" ;;
    esac
  done
  shift $((OPTIND - 1))
  OPTIND=1
  lives "$node" || die "$node is not running: ci/slurm/local.sh up"
  nsenter --target "$(first_process "$node")" --mount --uts --net --pid --ipc --cgroup --wd=/srv -- \
    setpriv --reuid="$(id_of "$user")" --regid="$(id_of "$user")" --clear-groups --inh-caps=-all \
    env --ignore-environment SLURM_CONF=/run/slurm/etc/slurm.conf PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    HOME="$([ "$user" = root ] && echo /root || echo "/home/$user")" USER="$user" LOGNAME="$user" "$@"
}

id_of() {
  awk -F: -v name="$1" '$1 == name {print $3; found = 1} END {exit !found}' "$state/etc/passwd" || die "there is no user '$1'"
}

# fail NAME: as a power cut: its processes get no signal that they could handle, its memory and /tmp are kept as on a disk
fail() {
  local pid
  lives "$1" || die "$1 is not running"
  pid=$(first_process "$1")
  kill -KILL "$pid" "$(cat "$state/pid/$1")"
  wait_for "the end of $1" gone "$1" "$pid"
  rm -f "$state/pid/$1" "$state/$1/run/ready"
  if [ -d $freezer ]; then
    remove_cgroups "$freezer/$cgroup/$1"
  fi
}

gone() {
  ! lives "$1" && [ ! -e "/proc/$2" ]
}

remove_cgroups() {
  [ ! -d "$1" ] || wait_for "the end of what is in $1" emptied "$1"
}

emptied() {
  find "$1" -depth -type d -exec rmdir {} +
}

down() {
  local pidfile
  for pidfile in "$state"/pid/node* "$state"/pid/login; do
    if [ -e "$pidfile" ] && lives "${pidfile##*/}"; then
      fail "${pidfile##*/}"
    fi
  done
  if [ -d $freezer ]; then
    remove_cgroups "$freezer/$cgroup"
  fi
  rm -rf --one-file-system "$state"
}

[ "$(id -u)" = 0 ] || die "a local Slurm needs root: run it as root"
case ${1:-} in
  up | down | run | fail | start | namespaces | machine) "$@" ;;
  *) die "usage: ci/slurm/local.sh up [NODES [GPUS]] | run [-n NODE] [-u USER] COMMAND… | fail NODE | start NODE | down" ;;
esac
