#!/bin/sh
# Remove uv's notes of when it saw each wheel, and the line of RECORD that lists them: the same wheels fetched at another
# time would make another image.
set -eu
find /opt/*_venv -path '*.dist-info/uv_cache.json' | while read -r note; do
  sed -i '/\.dist-info\/uv_cache\.json,/d' "${note%/*}/RECORD"
  rm "$note"
done
