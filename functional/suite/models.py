"""From `policy.model_name` to a local model directory, and to the tokenizer that counts its prompts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.architectures import read_config
from functional.runtime.recipe.paths import is_folder
from functional.suite.shapes import MADE, SHAPES
from functional.suite.sums import check_sums
from functional.suite.vocabulary import PlainTokenizer, load_tokenizer, random_models_tokenizer

ARITHMETIC = "builtin:arithmetic"
ARITHMETIC_DIR = Path(__file__).parent / "arithmetic_model"
"""Part of the package: made once with `functional make-model`, and the same bytes on every machine."""
RANDOM = "builtin:random-0.6b"
TOOLS = "builtin:tools"
TOOLS_DIR = Path(__file__).parent / "tools_model"
"""Calls tools: made once with `functional make-model --shape tools`."""
BUILTIN = (ARITHMETIC, TOOLS, *MADE)
REMEDY = "take the file from the repository again, or install the package anew"


def find_model(name: str, run_dir: Path, say: Callable[[str], None]) -> Path:
    """Return the model's folder. `builtin:arithmetic` and `builtin:tools` are in the package; those of `shapes.MADE`
    are made, and kept where `FUNCTIONAL_CACHE` says so.

    Raises ConfigError when `name` is neither built in, a local directory, nor to be had from the hub, and when a file
    of the built-in model is damaged.
    """
    if (embedded := embedded_dir(name)) is not None:
        check_sums(embedded, REMEDY)
        return embedded
    if name in MADE:
        return _make_random(name, run_dir, say)
    if is_folder(name):
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise ConfigError(
            f"policy.model_name={name!r}: not a local directory, and no hub copy can be had "
            f"({type(error).__name__}); built in are {', '.join(BUILTIN)}"
        ) from error


def known_config(name: str) -> dict[str, Any]:
    """What is known of the model's config.json before a run; empty for a hub model, and for a folder without one."""
    if name in MADE:
        return SHAPES[MADE[name]].as_config()
    return read_config((embedded_dir(name) or Path(name)) / "config.json")


def find_tokenizer(name: str) -> Any | None:
    """The model's tokenizer, or None for a hub model that is not on this machine yet: nothing is downloaded here.

    Raises ConfigError when a local directory holds none that transformers can load.
    """
    if (embedded := embedded_dir(name)) is not None:
        check_sums(embedded, REMEDY)
        return PlainTokenizer(load_tokenizer(embedded))
    if name in MADE:
        return PlainTokenizer(random_models_tokenizer(SHAPES[MADE[name]].vocab_size))
    if not is_folder(name):
        return _cached_tokenizer(name)
    try:
        return _auto_tokenizer(Path(name))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"policy.model_name={name!r}: transformers loads no tokenizer from it: {reason}") from error


def embedded_dir(name: str) -> Path | None:
    """Folder of a model that is part of the package; None for any other."""
    return {ARITHMETIC: ARITHMETIC_DIR, TOOLS: TOOLS_DIR}.get(name)


def _make_random(name: str, run_dir: Path, say: Callable[[str], None]) -> Path:
    cache = os.environ.get("FUNCTIONAL_CACHE")
    folder = (Path(cache) if cache else run_dir) / name.replace(":", "-")
    if (folder / "config.json").is_file():
        say(f"{name}: kept in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    say(f"{name}: making it")
    from functional.suite.model import random_model  # torch and transformers: seconds of import, needed here alone

    summary = random_model(folder, MADE[name])
    say(f"{name}: {summary.params} parameters, sha256 {summary.sha256[:12]}")
    return folder


def _cached_tokenizer(name: str) -> Any | None:
    """Of the hub's local cache, which may hold no model of that name, or not all of it."""
    from huggingface_hub import snapshot_download

    try:
        return _auto_tokenizer(Path(snapshot_download(name, local_files_only=True)))
    except Exception:
        return None


def _auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # seconds of import

    return AutoTokenizer.from_pretrained(str(folder))
