"""What NeMo RL's output says: its refits, what became of the caches, its steps, how far it came and why it failed.

It has no other record of these; the words are those of its source, and its own functional test counts the same lines.
"""

import re
from dataclasses import dataclass, field

REFIT = "Performing policy generation refit"
FIRST_REFIT = "Policy generation refit completed successfully"
INVALIDATED = "Invalidated generation backend KV caches after weight update"
NOT_INVALIDATED = (
    "Failed to invalidate generation backend KV caches",
    "KV cache invalidation not supported or only partially applied",
)
MILESTONES = (
    ("recipe", "Applied CLI overrides"),
    ("cluster", "Ray inference cluster initialized"),
    ("etcd", "[Dynamo] etcd ready"),
    ("nats", "[Dynamo] NATS ready"),
    ("worker_launched", "launching argv="),
    ("frontend", "[Dynamo] frontend ready"),
    ("setup", "RL INIT TIMING BREAKDOWN"),
    ("first_refit", FIRST_REFIT),
    ("trained", "Max number of steps has been reached"),
    ("ended", "Async GRPO training complete!"),
)
"""Name, and what the line holds that marks it; in the order in which they are reached."""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ACTOR = re.compile(r"^\((?P<name>[^()]*?)(?:\[[^\]]*\])? pid=\d+[^)]*\) ?")
RAISED = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout)): ?(?P<text>.*)")
FILTERED = re.compile(r"(?P<tokens>\d+)/\d+ valid tokens have -inf in prev_logprobs")
CAUGHT = re.compile(r"❌ (?P<text>.*)")
LONGEST = 400


@dataclass
class NemoRlLog:
    """Counts over the lines fed to it so far. filtered: sampled tokens that the trainer's top-k or top-p would cut."""

    refits: int = 0
    first_refits: int = 0
    invalidations: int = 0
    not_invalidated: list[str] = field(default_factory=list)
    filtered: int = 0
    milestones: dict[str, float] = field(default_factory=dict)
    caught: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    def feed(self, line: str, seconds: float) -> str | None:
        """Take one line, `seconds` after the start. Returns the milestone that it marks, if it is a new one."""
        plain = ANSI.sub("", line)
        text = ACTOR.sub("", plain)
        self.refits += REFIT in text
        self.first_refits += FIRST_REFIT in text
        self.invalidations += INVALIDATED in text
        if any(words in text for words in NOT_INVALIDATED):
            self.not_invalidated.append(shortened(text))
        if found := FILTERED.search(text):
            self.filtered += int(found["tokens"])
        if found := CAUGHT.search(text):
            self.caught.append(shortened(found["text"]))
        if found := RAISED.match(text.strip()):
            self.raised.append(shortened(f"{found['kind'].rpartition('.')[2]}: {found['text']}".strip(" :")))
        for name, mark in MILESTONES:
            if mark in text and name not in self.milestones:
                self.milestones[name] = seconds
                return name
        return None

    @property
    def reached(self) -> str:
        """The last milestone that was reached."""
        return max(self.milestones, key=lambda name: self.milestones[name], default="start")

    @property
    def cause(self) -> str | None:
        """What its output says of why it failed: the last error that is not Ray's own wrapping of another."""
        own = [line for line in self.raised if not line.startswith(WRAPPERS)]
        if own or self.raised:
            return (own or self.raised)[-1]
        return self.caught[-1] if self.caught else None


def shortened(text: str) -> str:
    """One line; of a long one the beginning and the end, where a quoted traceback has its cause."""
    plain = " ".join(text.split())
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]} … {plain[-LONGEST // 2 :]}"


WRAPPERS = ("ActorDiedError", "ActorUnavailableError", "RayTaskError", "RayActorError", "WorkerCrashedError")
"""Ray's errors that wrap one raised in an actor, whose own line follows within them."""
