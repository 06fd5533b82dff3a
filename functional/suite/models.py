"""From `policy.model_name` to a local model directory."""

import os
from collections.abc import Callable
from pathlib import Path

from functional.runtime.errors import ConfigError

BUILTIN = {"builtin:arithmetic": "make_model", "builtin:random-0.6b": "random_model"}


def find_model(name: str, run_dir: Path, say: Callable[[str], None]) -> Path:
    """Return the model's folder; a built-in one is made, in `FUNCTIONAL_CACHE` if that is set, and then kept.

    Raises ConfigError when `name` is neither built in, a local directory, nor in the local hub cache.
    """
    if name in BUILTIN:
        cache = os.environ.get("FUNCTIONAL_CACHE")
        folder = (Path(cache) if cache else run_dir) / name.replace(":", "-")
        if (folder / "config.json").is_file():
            say(f"{name}: kept in {folder}")
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        say(f"{name}: making it")
        from functional.suite import model  # torch and transformers: seconds of import, needed here alone

        summary = getattr(model, BUILTIN[name])(folder)
        say(f"{name}: {summary.params} parameters, sha256 {summary.sha256[:12]}")
        return folder
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise ConfigError(
            f"policy.model_name={name!r}: not a local directory, and no hub copy can be had "
            f"({type(error).__name__}); built in are {', '.join(BUILTIN)}"
        ) from error
