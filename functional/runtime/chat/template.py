"""Conversations to token IDs: the policy's chat template and tokenizer, with the exact IDs of what was generated.

A text has several encodings, and a model does not always generate the one that its tokenizer chooses. So what was
generated is never encoded again: the conversation is rendered as text, once whole and once up to the last turn whose
IDs are known; both hold the same number of turns' ends up to there. What follows the last of these is encoded, and put
behind the known IDs. An end of turn is a special token, at which encoding begins anew, so this gives what encoding the
whole would, but for the known part.
"""

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

from functional.runtime.chat.request import ChatError, ChatRequest
from functional.runtime.errors import ConfigError

KEPT_TOKENS = 1 << 20
"""Of turns that were encoded: some 50 MB with their texts."""
ANSWER = "answer-7f3a91"
"""Text that no template has of its own."""


class ChatTemplate:
    """Renders for one policy."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], template: str | None = None) -> None:
        """tokenizer: a Hugging Face one; ends: IDs at which the model ends its turn; template: Jinja, in place of the
        tokenizer's.

        Raises ConfigError where the template ends no turn of the assistant with one of them.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template  # seconds of import

        self._tokenizer = tokenizer
        self._template = template
        self._compile = _compile_jinja_template
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        added = tokenizer.get_added_vocab()  # another token may be part of a longer one: no turn can be told by it
        texts = sorted((text for text, token in added.items() if token in ends), key=len, reverse=True)
        self._ends = re.compile("|".join(map(re.escape, texts)))
        self._encoder = Encoder(tokenizer, self._ends, texts)
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
            return tuple(self._encoder.encode(whole))
        known = self._render(request, request.messages[: request.prefix_turn + 1], False)
        turns = len(self._ends.findall(known))
        ends = list(self._ends.finditer(whole))
        if not 0 < turns <= len(ends):
            message = f"the template renders {turns} ends of turns up to it, and {len(ends)} in the whole conversation"
            raise ChatError(f"messages.{request.prefix_turn}", message)
        rest = self._encoder.encode(whole[ends[turns - 1].start() :])
        return request.prefix + tuple(rest[request.prefix[-1] == rest[0] :])

    def _render(self, request: ChatRequest, messages: list[dict[str, Any]], with_prompt: bool) -> str:
        try:
            # What `apply_chat_template` does, but for its search of every message for dataclasses.
            compiled = self._compile(self._tokenizer.get_chat_template(self._template, request.tools))
            text: str = compiled.render(
                messages=messages,
                tools=request.tools,
                documents=request.documents,
                add_generation_prompt=with_prompt,
                **self._special_tokens | request.template_kwargs,
            )
        except Exception as error:  # whatever a template raises, its author's words among it
            reason = " ".join(str(error).split())[:300]
            raise ChatError("messages", f"the chat template refuses them: {reason}") from error
        return text

    def _refuse_unfit(self, texts: list[str]) -> None:
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        try:
            text = self._tokenizer.apply_chat_template(probe, chat_template=self._template, tokenize=False)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"the chat template refuses a question and its answer: {reason}") from error
        if not texts or not self._ends.search(text.rpartition(ANSWER)[2]):
            known = ", ".join(texts) or "the tokens that end an answer: they are no special tokens of the tokenizer"
            raise ConfigError(f"the chat template ends the assistant's turn with none of {known}")


class Encoder:
    """Texts to token IDs, turn by turn, with the IDs of turns kept that come again: a group of rollouts begins with the
    same, and all with the same tools."""

    def __init__(self, tokenizer: Any, ends: re.Pattern[str], texts: list[str]) -> None:
        """ends: matches the special tokens `texts`, at each of which encoding begins anew."""
        self._tokenizer = tokenizer
        self._ends = ends
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        # Such a token takes the blanks before it, which belong to another turn.
        self._is_whole = any(text in added and added[text].lstrip for text in texts)
        self._kept: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0

    def encode(self, text: str) -> list[int]:
        """Without special tokens of the tokenizer's own accord."""
        if self._is_whole:
            return self._encoded(text)
        ids: list[int] = []
        begin = 0
        for end in self._ends.finditer(text, 1):
            ids += self._turn(text[begin : end.start()])
            begin = end.start()
        return ids + self._turn(text[begin:])

    def _turn(self, text: str) -> list[int]:
        ids = self._kept.get(text)
        if ids is not None:
            self._kept.move_to_end(text)
            return ids
        ids = self._kept[text] = self._encoded(text)
        self._size += len(ids)
        while self._size > KEPT_TOKENS:
            self._size -= len(self._kept.popitem(last=False)[1])
        return ids

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


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
