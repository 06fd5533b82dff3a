#!/usr/bin/env bash
# Pack what a GPU machine without a network lacks, as parts that ci/gpu_run.sh unpacks there. The machine has a Python
# 3.12 with torch 2.11, triton and OpenCV; everything else comes from lockfiles/gpu-plain.txt and Debian's etcd.
#
#   bash ci/gpu_pack.sh            writes .carry/part00, part01, …
#
# NEMO_RL=TREE packs a checkout of NeMo RL too, with what its environment (lockfiles/nemo-rl-cuda.txt) has beyond that.
# UV (uv) installs; CARRY (.carry) takes the parts; PART_BYTES (56000000) is the size of one; the first
# has zstd beside it, and the working tree travels too. EXPERTS=1 keeps the kernels for mixtures of experts, 40 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-uv}
carry=${CARRY:-.carry}
part_bytes=${PART_BYTES:-56000000}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Already there, or for models, formats and chips that the suite does not use.
left_out='torch|torchaudio|torchvision|torch-c-dlpack-ext|triton|opencv-python-headless|ninja|cuda-[a-z]*|tilelang'
left_out+='|z3-solver|flashinfer-[a-z]*|tokenspeed-[a-z]*|quack-kernels|humming-kernels|fastsafetensors'
left_out+='|nvidia-(cu[a-z]+|cuda-[a-z]+|cudnn-cu13|cudnn-frontend|cusparselt-cu13|cutlass-dsl[a-z0-9-]*|ml-py|nvjitlink'
left_out+='|nvshmem-cu13|nvtx|nvvm)'

# Of NeMo RL's: what the machine's Python has as well, what only its tests use, and profilers.
nemo_left_out='absl-py|contourpy|coverage|cycler|fonttools|iniconfig|kiwisolver|markdown|matplotlib|pandas|pluggy|py-spy'
nemo_left_out+='|pyarrow|pyparsing|pytest|pytest-asyncio|pytest-timeout|pytz|scipy|tensorboard|tensorboard-data-server'
nemo_left_out+='|virtualenv|werkzeug|wrapt'

main() {
  mkdir -p "$work/root/bin" "$carry"
  install_locked
  [ -z "${NEMO_RL:-}" ] || add_nemo_rl "$NEMO_RL"
  mv "$work/root/site/bin/nats-server" "$work/root/bin/"
  fetch_etcd
  drop_unused
  write_parts
  ls -l "$carry"/part*/carry.*
}

install_locked() {
  awk -v left_out="^(${left_out})==" '/^[a-zA-Z0-9]/ { keep = $0 !~ left_out } keep' lockfiles/gpu-plain.txt >"$work/lock.txt"
  "$uv" pip install --quiet --target "$work/root/site" --no-deps --require-hashes --only-binary :all: \
    --python-version 3.12 --python-platform x86_64-manylinux_2_39 --link-mode copy -r "$work/lock.txt"
}

# Its tree at the commit, and the packages whose version there is another than the ones packed already.
add_nemo_rl() {
  local nemo=$work/root/nemo
  mkdir -p "$nemo/tree"
  git -C "$1" archive HEAD nemo_rl examples pyproject.toml docker/dynamo | tar x -C "$nemo/tree"
  git -C "$1" rev-parse HEAD >"$nemo/tree/.commit"
  # nccl4py asks for newer CUDA bindings than the machine may have.
  awk -v left_out="^(${left_out/cuda-\[a-z]\*/cuda-toolkit}|${nemo_left_out})==" '
    FNR == NR { if (/^[a-zA-Z0-9]/) packed[$1] = 1; next }
    /^[a-zA-Z0-9]/ { keep = !($1 in packed) && $1 !~ left_out } keep' \
    "$work/lock.txt" lockfiles/nemo-rl-cuda.txt >"$work/nemo.txt"
  "$uv" pip install --quiet --target "$nemo/site" --no-deps --require-hashes --only-binary :all: \
    --no-binary antlr4-python3-runtime --python-version 3.12 --python-platform x86_64-manylinux_2_39 --link-mode copy \
    -r "$work/nemo.txt"
  # Programs that only recipes with this logger start, and a part of NCCL that GRPO does not use.
  rm -rf "$nemo"/site/bin "$nemo"/site/wandb/bin "$nemo"/site/nccl/ep
}

fetch_etcd() {
  mkdir "$work/etcd"
  (cd "$work/etcd" && apt-get download --quiet etcd-server >/dev/null && dpkg -x etcd-server_*.deb .)
  cp "$work/etcd/usr/bin/etcd" "$work/root/bin/"
}

# Half of the bytes are kernels for older chips and for mixtures of experts (Hopper takes FlashAttention 3), and tests.
drop_unused() {
  local site=$work/root/site
  [ -n "${EXPERTS:-}" ] || rm "$site"/vllm/_moe_C.abi3.so
  rm -rf "${site:?}/bin" "$site"/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so \
    "$site"/ray/{rllib,dashboard/client} "$site"/pycountry/locales
  find "$site"/{sympy,networkx,numba,llvmlite} -type d -name tests -prune -exec rm -rf {} +
  find "$work/root" -type d -name __pycache__ -prune -exec rm -rf {} +
}

# The first part brings its own zstd, which the machine may lack.
write_parts() {
  local file number library
  rm -rf "$carry"/part*
  tar c -C "$work/root" --owner=0 --group=0 . | zstd -q -12 --long=27 -T0 | split -b "$part_bytes" -d - "$work/carry."
  for file in "$work"/carry.*; do
    number=${file##*.}
    mkdir -p "$carry/part$number"
    mv "$file" "$carry/part$number/"
  done
  cp "$(command -v zstd)" "$carry/part00/"
  ldd "$(command -v zstd)" | awk '/lib(z|lzma|lz4|zstd)\.so/ { print $3 }' | while read -r library; do
    cp "$library" "$carry/part00/"
  done
}

main "$@"
