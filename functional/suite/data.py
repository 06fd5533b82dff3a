"""Which data a run draws its prompts from, and what of it the report keeps: name, number of questions, hash."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from functional.runtime.errors import ConfigError
from functional.suite.tasks import arithmetic, read_questions


@dataclass(frozen=True)
class DataRecord:
    """sha256: of the file's bytes, or of a built-in set's questions as JSON lines; None where prompts are made anew."""

    dataset_name: str
    source: str
    questions: int | None
    sha256: str | None


def describe_data(name: str, num_prompts: int) -> DataRecord:
    """Read the data of `data.dataset_name` and say what it is.

    Raises ConfigError naming a bad line, or when there are fewer questions than `num_prompts`, a step's.
    """
    record = _read(name)
    if record.questions is not None and record.questions < num_prompts:
        raise ConfigError(f"grpo.num_prompts_per_step={num_prompts}: {name} holds {record.questions} questions only")
    return record


def _read(name: str) -> DataRecord:
    if name == "arithmetic":
        lines = [json.dumps(asdict(question), sort_keys=True) for question in arithmetic()]
        return DataRecord(name, "built in", len(lines), _sha256("\n".join(lines).encode()))
    if name == "token_set":
        return DataRecord(name, "made from grpo.seed", None, None)
    try:
        questions = read_questions(Path(name))
        return DataRecord(name, "file", len(questions), _sha256(Path(name).read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.dataset_name={name!r}: {' '.join(str(error).split())}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
