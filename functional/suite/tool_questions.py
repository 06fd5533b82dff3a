"""Questions that take a tool twice: `3+4-5`, the tools for them, and which answer is right."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("add", operator.add),
    "-": ("sub", operator.sub),
}
"""Sign → the tool's name, and what it does."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"a {sign} b",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for sign, (name, _) in OPERATIONS.items()
]


@dataclass(frozen=True)
class ToolQuestion:
    """first `signs[0]` second `signs[1]` third, from left to right, all of one digit."""

    first: int
    second: int
    third: int
    signs: tuple[str, str]

    @property
    def text(self) -> str:
        return f"{self.first}{self.signs[0]}{self.second}{self.signs[1]}{self.third}"

    @property
    def answer(self) -> int:
        return calculate(self.signs[1], calculate(self.signs[0], self.first, self.second), self.third)


def tool_questions() -> list[ToolQuestion]:
    """Every one whose values all lie from 0 up."""
    questions = (
        ToolQuestion(first, second, third, (one, other))
        for first in range(10)
        for second in range(10)
        for third in range(10)
        for one in OPERATIONS
        for other in OPERATIONS
    )
    return [q for q in questions if calculate(q.signs[0], q.first, q.second) >= 0 <= q.answer]


def calculate(sign: str, a: int, b: int) -> int:
    return OPERATIONS[sign][1](a, b)


def use_tool(name: str, arguments: str) -> str | None:
    """The tool's result as text; None for a call that is none: another name, or arguments that are not two integers."""
    tools = dict(OPERATIONS.values())
    try:
        given = json.loads(arguments)
        return str(tools[name](int(given["a"]), int(given["b"])))
    except (KeyError, TypeError, ValueError):
        return None
