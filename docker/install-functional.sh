#!/bin/sh
# Install our own code: the functional package for the trainer, the engine wheel for Dynamo, the project folder that
# users run in, and /opt/release/build.json; and NeMo RL, where its tree was given. Kept apart from the environments: a
# change here costs seconds.
set -eu
export UV_NO_PROGRESS=1

tree=/mnt/tree

# install_wheel SOURCE ENVIRONMENT
install_wheel() {
  # setuptools writes beside the sources, which are read-only here
  rm -rf /tmp/source /tmp/wheel
  cp -r "$1" /tmp/source
  uv build --quiet --wheel --no-cache --no-build-isolation --python /opt/trainer_venv/bin/python \
    --out-dir /tmp/wheel /tmp/source
  uv pip install --quiet --no-cache --no-index --no-deps --python "/opt/$2/bin/python" /tmp/wheel/*.whl
  rm -rf /tmp/source /tmp/wheel /tmp/uv-*.lock
}

install_wheel "$tree/functional" trainer_venv
if [ -d /opt/dynamo_venv ]; then
  install_wheel "$tree/functional/engine" dynamo_venv
fi
sh "$tree/docker/forget-fetch-times.sh"
python3 "$tree/docker/compile_bytecode.py" /opt/*_venv/lib/python3*/site-packages/functional

PYTHONPATH=$tree python3 -B -m docker.install_nemo_rl

mkdir -p /opt/functional/tests/functional
cp "$tree/functional/pyproject.toml" /opt/functional/
cp -r "$tree/functional/recipes" /opt/functional/recipes
cp "$tree/tests/functional/grpo_dynamo.sh" /opt/functional/tests/functional/grpo_dynamo.sh
chmod -R u=rwX,go=rX /opt/functional # whatever the umask of the checkout

# enroot starts a login shell, and Debian's /etc/profile sets PATH anew.
cat >/etc/profile.d/trainer-venv.sh <<END
PATH=${NEMO_RL:+/opt/nemo_rl_venv/bin:}/opt/trainer_venv/bin:\$PATH
END

mkdir -p /opt/release
PYTHONPATH=$tree python3 -B -m docker.write_build_json >/opt/release/build.json
rm -f /tmp/nemo-rl.json
