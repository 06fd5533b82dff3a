#!/bin/sh
# Install our own code: the functional package for the trainer, the engine wheel for Dynamo, the project folder that
# users run in, and /opt/release/build.json. Kept apart from the environments: a change here costs seconds.
set -eu
export UV_NO_PROGRESS=1

# install_wheel SOURCE ENVIRONMENT PACKAGE
install_wheel() {
  # setuptools writes beside the sources, which are read-only here
  rm -rf /tmp/source /tmp/wheel
  cp -r "$1" /tmp/source
  uv build --quiet --wheel --no-cache --no-build-isolation --python /opt/trainer_venv/bin/python \
    --out-dir /tmp/wheel /tmp/source
  uv pip install --quiet --no-cache --no-index --no-deps --python "/opt/$2/bin/python" /tmp/wheel/*.whl
  rm -rf /tmp/source /tmp/wheel /tmp/uv-*.lock
  # uv notes when it saw the wheel; two builds would differ by that alone
  rm -f "/opt/$2"/lib/python3*/site-packages/"$3"-*.dist-info/uv_cache.json
  sed -i '/\/uv_cache.json,/d' "/opt/$2"/lib/python3*/site-packages/"$3"-*.dist-info/RECORD
}

install_wheel /mnt/functional trainer_venv dynamo_rl_functional
if [ -d /opt/dynamo_venv ]; then
  install_wheel /mnt/functional/engine dynamo_venv dynamo_rl_engine
fi
python3 /mnt/compile_bytecode.py /opt/*_venv/lib/python3*/site-packages/functional

mkdir -p /opt/functional/tests/functional
cp /mnt/functional/pyproject.toml /opt/functional/
cp -r /mnt/functional/recipes /opt/functional/recipes
cp /mnt/grpo_dynamo.sh /opt/functional/tests/functional/grpo_dynamo.sh

# enroot starts a login shell, and Debian's /etc/profile sets PATH anew.
cat >/etc/profile.d/trainer-venv.sh <<'END'
PATH=/opt/trainer_venv/bin:$PATH
END

mkdir -p /opt/release
python3 /mnt/write_build_json.py >/opt/release/build.json
