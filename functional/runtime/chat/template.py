"""Conversations to token IDs: the policy's chat template and tokenizer, with the exact IDs of what was generated.

A text has several encodings, and a model does not always generate the one that its tokenizer chooses. So what was
generated is never encoded again: the conversation is rendered as text, once whole and once up to the last turn whose
IDs are known; both hold the same number of turns' ends up to there. What follows the last of these is encoded, and put
behind the known IDs. An end of turn is a special token, at which encoding begins anew, so this gives what encoding the
whole would, but for the known part.
"""

import json
import re
from pathlib import Path
from typing import Any

from functional.runtime.chat.request import ChatError, ChatRequest
from functional.runtime.errors import ConfigError

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class ChatTemplate:
    """Renders for one policy."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], template: str | None = None) -> None:
        """tokenizer: a Hugging Face one; ends: IDs at which the model ends its turn; template: Jinja, in place of the
        tokenizer's.

        Raises ConfigError where the template ends no turn of the assistant with one of them.
        """
        self._tokenizer = tokenizer
        self._template = template
        texts = sorted(tokenizer.convert_ids_to_tokens(sorted(ends)), key=len, reverse=True)
        self._ends = re.compile("|".join(map(re.escape, texts)))
        self._refuse_unfit(texts)

    @classmethod
    def load(cls, model_dir: Path, template_file: str | None = None) -> "ChatTemplate":
        """Of a model's folder. Raises ConfigError where it has no tokenizer or no template for chat."""
        from transformers import AutoTokenizer  # seconds of import

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
            template = Path(template_file).expanduser().read_text(encoding="utf-8") if template_file else None
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{model_dir}: no tokenizer or template for chat: {reason}") from error
        if template is None and not tokenizer.chat_template:
            raise ConfigError(f"{model_dir}: its tokenizer has no chat template: set worker_args.custom_jinja_template")
        return cls(tokenizer, frozenset(end_ids(model_dir, tokenizer)), template)

    def prompt(self, request: ChatRequest) -> tuple[int, ...]:
        """The token IDs that the request stands for. Raises ChatError where the template does not take it."""
        whole = self._render(request, request.messages, request.add_generation_prompt)
        if not request.prefix:
            return tuple(self._encode(whole))
        known = self._render(request, request.messages[: request.prefix_turn + 1], False)
        turns = len(self._ends.findall(known))
        ends = list(self._ends.finditer(whole))
        if not 0 < turns <= len(ends):
            message = f"the template renders {turns} ends of turns up to it, and {len(ends)} in the whole conversation"
            raise ChatError(f"messages.{request.prefix_turn}", message)
        rest = self._encode(whole[ends[turns - 1].start() :])
        return request.prefix + tuple(rest[request.prefix[-1] == rest[0] :])

    def _render(self, request: ChatRequest, messages: list[dict[str, Any]], with_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=request.tools,
                documents=request.documents,
                chat_template=self._template,
                add_generation_prompt=with_prompt,
                tokenize=False,
                **request.template_kwargs,
            )
        except Exception as error:  # whatever a template raises, its author's words among it
            reason = " ".join(str(error).split())[:300]
            raise ChatError("messages", f"the chat template refuses them: {reason}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _refuse_unfit(self, texts: list[str]) -> None:
        try:
            text = self._tokenizer.apply_chat_template(PROBE, chat_template=self._template, tokenize=False)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"the chat template refuses a question and its answer: {reason}") from error
        behind = text[text.rfind("b") :]
        if not self._ends.search(behind):
            raise ConfigError(f"the chat template ends the assistant's turn with none of {', '.join(texts)}")
        if any(len(self._encode(end)) != 1 for end in texts):
            raise ConfigError(f"the tokenizer does not take each of {', '.join(texts)} as one token")


def end_ids(model_dir: Path, tokenizer: Any) -> list[int]:
    """IDs at which the engine ends an answer: the model's own, and the tokenizer's."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found += given if isinstance(given, list) else [given]
            if given is not None:
                break
    return sorted({one for one in [*found, tokenizer.eos_token_id] if one is not None})
