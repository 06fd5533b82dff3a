"""How far the client's process grows with many requests in flight, all of them answered at once.

    python -m bench.rollout_memory URL TOKENS IN_FLIGHT PROMPT_TOKENS

prints JSON; sizes in bytes. answers: of all answers on the wire.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.instant_server import MODEL, VOCAB_SIZE, answer
from bench.rollout_clients import OurClient, Target, make_prompts


def main(url: str, tokens: str, inflight: str, prompt_tokens: str) -> None:
    number = int(inflight)
    prompts = make_prompts(number, int(prompt_tokens), VOCAB_SIZE)
    size = len(msgspec.json.encode(answer(int(tokens)))) + len(msgspec.json.encode(prompts[0]))
    with tempfile.TemporaryDirectory() as folder:
        client = OurClient(Target(url, MODEL, VOCAB_SIZE, 1 << 20), None, Path(folder))
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        completions = client.complete(prompts, int(tokens))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        client.close()
    assert len(completions) == number
    found = {"tokens": int(tokens), "inflight": number, "answers": size * number, "before": before, "peak": peak}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
