"""Print the scalars that NeMo RL wrote for TensorBoard, as JSON: run by NeMo RL's own Python, which has tensorboard.

    python read_events.py FOLDER ANSWER_FILE

The answer: {"scalars": {tag: [[step, value], …]}, "tags": [every tag of any kind]}.
"""

import json
import sys
from pathlib import Path


def main(folder: str, answer: str) -> None:
    """Read every event file below `folder`; of two values for one step the later file's counts."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found]
        SCALARS,
        TENSORS,
        EventAccumulator,
    )

    scalars: dict[str, dict[int, float]] = {}
    tags: set[str] = set()
    files = sorted(Path(folder).rglob("*tfevents*"), key=lambda path: path.stat().st_mtime)
    for file in files:
        events = EventAccumulator(str(file), size_guidance={SCALARS: 0, TENSORS: 0})
        events.Reload()
        tags.update(tag for kind in events.Tags().values() if isinstance(kind, list) for tag in kind)
        for tag in events.Tags()[SCALARS]:
            scalars.setdefault(tag, {}).update((point.step, point.value) for point in events.Scalars(tag))
    found = {"scalars": {tag: sorted(by_step.items()) for tag, by_step in scalars.items()}, "tags": sorted(tags)}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
