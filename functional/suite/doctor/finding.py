"""What a check of the doctor answers."""

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """`RECOVERED`: it went wrong, and the run went on correctly. `UNKNOWN`: there was nothing to tell it from."""

    OK = "ok"
    PROBLEM = "problem"
    RECOVERED = "recovered"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """symptom: a row of the troubleshooting table; cause: a word for programs, empty where nothing is wrong;
    looked_at: files and processes; next_step: what to do, empty where nothing is."""

    symptom: str
    result: Result
    cause: str
    looked_at: str
    found: str
    next_step: str = ""
