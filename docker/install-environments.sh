#!/bin/sh
# Install the locked environments with no network: /opt/trainer_venv, with BUILD_DYNAMO /opt/dynamo_venv, and with NEMO_RL
# /opt/nemo_rl_venv.
#
#   install-environments.sh PATTERN    only the locked packages whose line matches; those that are there already stay
set -eu

# uv's own cache is on the layer's file system, so that the environments are hard links to the same files; it goes
# away below, in the same layer.
export UV_CACHE_DIR=/opt/.uv-cache UV_LINK_MODE=hardlink UV_OFFLINE=1 UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1

python3 -m zipfile -e /mnt/wheels/uv-*.whl /tmp/uv
uv=$(echo /tmp/uv/uv-*.data/scripts/uv)
chmod +x "$uv"

# install_environment NAME LOCK PATTERN: a package of which there is no wheel is built as uv does, with our setuptools
install_environment() {
  [ -d "/opt/$1_venv" ] || "$uv" venv --quiet --python /usr/bin/python3 "/opt/$1_venv"
  awk -v pattern="$3" '/^[a-zA-Z0-9]/ { keep = $0 ~ pattern } keep' "/mnt/lockfiles/$2-$LOCKS.txt" >/tmp/lock.txt
  "$uv" pip sync --python "/opt/$1_venv/bin/python" --require-hashes --no-index --find-links /mnt/wheels \
    --find-links /mnt/more-wheels --allow-empty-requirements /tmp/lock.txt
}

install_environment trainer trainer "$1"
[ -z "$NEMO_RL" ] || install_environment nemo_rl nemo-rl "$1"
if [ -n "$BUILD_DYNAMO" ]; then
  install_environment dynamo dynamo "$1"
  # The recipe's etcd is the one in this environment, whether its archive was fetched or the base has a package.
  for archive in /mnt/archives/etcd-*.tar.gz; do
    [ -e /opt/dynamo_venv/bin/etcd ] || [ ! -e "$archive" ] ||
      tar -xzf "$archive" -C /opt/dynamo_venv/bin --strip-components=1 --no-same-owner --wildcards '*/etcd'
  done
  [ -e /opt/dynamo_venv/bin/etcd ] || ln -s "$(command -v etcd)" /opt/dynamo_venv/bin/etcd
fi

# A CUDA toolkit out of the wheels' parts, where the base has none, for kernels that are built at run time (FlashInfer,
# DeepGEMM, TileLang). The libraries' plain names are what a linker looks for.
toolkit=$(echo /opt/dynamo_venv/lib/python3*/site-packages/nvidia/cu13)
if [ -e "$toolkit/bin/nvcc" ] && [ ! -e /usr/local/cuda ]; then
  mkdir -p /usr/local/cuda/lib64
  ln -s "$toolkit/bin" "$toolkit/include" "$toolkit/nvvm" /usr/local/cuda/
  for library in "$toolkit"/lib/*.so.*; do
    ln -s "$library" "/usr/local/cuda/lib64/$(basename "${library%%.so.*}").so"
  done
fi

rm -rf "$UV_CACHE_DIR" /tmp/uv /tmp/lock.txt

for site in /opt/*_venv/lib/python3*/site-packages; do
  grep -v -e '^#' -e '^$' /mnt/left-out.txt | while read -r path; do
    find "$site" -path "$site/$path" -prune -exec rm -rf {} +
  done
done
sh /mnt/forget-fetch-times.sh

python3 /mnt/compile_bytecode.py /opt/*_venv/lib
