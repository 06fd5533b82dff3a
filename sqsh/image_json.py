"""`/opt/release/image.json`: the image that a run inside the squashfs tests.

The converter writes it, the kit's verify and the suite in the image read it; its place and its keys are defined here.
"""

from __future__ import annotations

import json

from sqsh.manifest import Image

IMAGE_JSON = "opt/release/image.json"


def image_json(image: Image, name: str) -> str:
    """`digest` and `media_type` of the image's manifest (or configuration, see Image), and the `name` it goes by."""
    return json.dumps({"digest": image.digest, "name": name, "media_type": image.media_type}, indent=2) + "\n"
