"""Tokenizers of the built-in models, and the text their chat template makes. Imports neither torch nor transformers.

A tokenizer here is a `tokenizers.Tokenizer`; `PlainTokenizer` gives it the methods of a Hugging Face one.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"

SPECIAL = [END_OF_TEXT, TURN_START, TURN_END, UNKNOWN]
CHARACTERS = ["\n", *map(chr, range(32, 127))]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% if call.function.arguments is mapping %}{% for name, value in call.function.arguments|items %}"
    "{{ '<parameter=' + name + '>\n' }}{{ value }}{{ '\n</parameter>\n' }}"
    "{% endfor %}{% endif %}{{ '</function>\n</tool_call>' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Calls as Qwen3-Coder writes them. Newlines are in expressions: Jinja's `trim_blocks` takes those after tags away."""

CALL_MARKS = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"]

TINY_VOCAB, TOOL_VOCAB, QWEN3_VOCAB = 128, 256, 151936
FIRST_SPECIAL = 151643
"""Of Qwen3's vocabulary."""


class PlainTokenizer:
    """A tokenizer with the part of a Hugging Face tokenizer's interface that `tasks.Tokenizer` names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The one of a model directory, as `write_model` saved it."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def random_models_tokenizer(vocab_size: int) -> Tokenizer:
    """One that knows every ID of a vocabulary of this size: of characters if it is small, else of words."""
    return tiny_tokenizer(vocab_size) if vocab_size < FIRST_SPECIAL else wide_tokenizer(vocab_size)


def tiny_tokenizer(vocab_size: int = TINY_VOCAB) -> Tokenizer:
    """One token a character: newline and printable ASCII; the special IDs before them, reserved ones behind."""
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - len(SPECIAL) - len(CHARACTERS))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, *reserved])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([special_token(t) for t in [*SPECIAL, *reserved]])
    return tokenizer


def tool_tokenizer() -> Tokenizer:
    """As `tiny_tokenizer`, with a token for each two digits and for each mark of a tool's call; 256 IDs.

    A number has several spellings in tokens, of which encoding knows one: what a model wrote with another has other IDs
    when its text is encoded again.
    """
    pairs = [(first, second) for first in string.digits for second in string.digits]
    known = [*SPECIAL, *CHARACTERS, *(first + second for first, second in pairs), *CALL_MARKS]
    reserved = [f"<|reserved_{i}|>" for i in range(TOOL_VOCAB - len(known))]
    vocabulary = {token: i for i, token in enumerate([*known, *reserved])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([special_token(t) for t in [*SPECIAL, *reserved]])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in CALL_MARKS])
    return tokenizer


def wide_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level, with lower-case words of one to four letters (after a space) for the IDs that bytes leave free.

    Qwen3's special tokens keep their IDs (151643…); what follows them is reserved. Every ID decodes, and a text of
    such words encodes to the IDs it was decoded from.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    base = sorted(pre_tokenizers.ByteLevel.alphabet())
    words: list[str] = []
    level = [""]
    while len(base) + len(words) < FIRST_SPECIAL:
        level = [word + letter for word in level for letter in letters]
        words += level[: FIRST_SPECIAL - len(base) - len(words)]
    vocabulary = {token: i for i, token in enumerate([*base, *("Ġ" + word for word in words)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - FIRST_SPECIAL - len(special))]
    tokenizer.add_special_tokens([special_token(t) for t in [*special, *reserved]])
    return tokenizer


def special_token(text: str) -> AddedToken:
    """A token that decoding may skip, matched in the text as it stands."""
    return AddedToken(text, special=True, normalized=False)


def chat_prompt(text: str) -> str:
    """What CHAT_TEMPLATE makes of one user message."""
    return f"{TURN_START}user\n{text}{TURN_END}\n{TURN_START}assistant\n"
