#!/usr/bin/env bash
# NeMo Gym's packages (lockfiles/gym.txt) in a folder of the state, for tests in the image: they are for its Python, and
# stay out of its environments, since Gym wants other versions of much that is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=$(realpath -m "${KIT_STATE:-.state}")

if cmp -s lockfiles/gym.txt "$state/gym/gym.txt"; then
  exit 0
fi
uv=$(command -v uv || echo "$state/uv/bin/uv")
rm -rf "$state/gym" "$state/gym.part"
"$uv" pip install --quiet --target "$state/gym.part" --python-version 3.13 --require-hashes \
  --only-binary :all: --no-binary antlr4-python3-runtime --requirements lockfiles/gym.txt
cp lockfiles/gym.txt "$state/gym.part/"
mv "$state/gym.part" "$state/gym"
