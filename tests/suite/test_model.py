"""Model directories: what `make-model` makes is complete and the same twice; the embedded one is as it was made."""

import json
import tomllib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from functional.suite import model as made
from functional.suite import vocabulary
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.sums import check_sums
from functional.suite.tasks import arithmetic

pytestmark = pytest.mark.unit


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_seed_same_bytes_and_another_seed_others(tmp_path):
    first, second, third = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    summary = made.make_model(first, steps=3)
    made.make_model(second, steps=3)
    made.make_model(third, steps=3, seed=1)
    assert files(first) == files(second)
    assert files(first)["model.safetensors"] != files(third)["model.safetensors"]
    assert summary.sha256 == made.file_sha256(first / "model.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_the_caller_s_torch_settings_and_random_state_of_threads_are_put_back(tmp_path):
    threads = torch.get_num_threads()
    made.make_model(tmp_path / "a", steps=1, threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_existing_folder_is_left_alone_and_a_failure_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    with pytest.raises(FileExistsError, match="remove it, or name another"):
        made.make_model(tmp_path / "a", steps=1)
    monkeypatch.setattr(made, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        made.make_model(tmp_path / "b", steps=1)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_directory_is_complete(tmp_path):
    out = tmp_path / "m"
    made.make_model(out, steps=1)
    check_sums(out, "")
    assert sorted(files(out)) == sorted(files(ARITHMETIC_DIR))
    check_directory(out)


def test_the_embedded_model_is_complete_and_neutral():
    check_sums(ARITHMETIC_DIR, "")
    check_directory(ARITHMETIC_DIR)


def check_directory(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == AutoConfig.from_pretrained(folder).vocab_size == vocabulary.TINY_VOCAB
    message = [{"role": "user", "content": "3+4="}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert prompt == vocabulary.chat_prompt("3+4=")
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def test_the_package_brings_every_file_of_the_embedded_model():
    package = ARITHMETIC_DIR.parents[1] / "pyproject.toml"
    patterns = tomllib.loads(package.read_text())["tool"]["setuptools"]["package-data"]["functional.suite"]
    taken = {path for pattern in patterns for path in ARITHMETIC_DIR.parent.glob(pattern)}
    assert {path.name for path in taken if path.parent == ARITHMETIC_DIR} == set(files(ARITHMETIC_DIR))


def test_tiny_tokenizer_is_one_token_a_character():
    tokenizer = vocabulary.tiny_tokenizer()
    assert tokenizer.get_vocab_size() == vocabulary.TINY_VOCAB
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é").tokens == [vocabulary.UNKNOWN]
    assert tokenizer.encode("7<|im_end|>").ids[1] == tokenizer.token_to_id(vocabulary.TURN_END)


def test_wide_tokenizer_knows_every_id():
    tokenizer = vocabulary.wide_tokenizer(151936)
    assert tokenizer.get_vocab_size() == 151936
    assert tokenizer.token_to_id(vocabulary.END_OF_TEXT) == 151643
    assert tokenizer.token_to_id(vocabulary.TURN_END) == 151645
    ids = [300, 20000, 151642, 77777]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert tokenizer.decode(tokenizer.encode("Zürich, 12 €!\n").ids) == "Zürich, 12 €!\n"
    assert all(tokenizer.id_to_token(i) for i in range(151936))


def test_random_model_has_the_shape_s_config_and_the_same_bytes_twice(tmp_path, monkeypatch):
    whole = made.SHAPES["Qwen3-0.6B"]
    less = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    monkeypatch.setitem(made.SHAPES, "small", replace(whole, config=whole.config | less))
    summary = made.random_model(tmp_path / "a", "small")
    made.random_model(tmp_path / "b", "small")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert sum(p.numel() for p in model.parameters()) == summary.params
    with pytest.raises(ValueError, match=r"want one of Qwen3-0\.6B"):
        made.random_model(tmp_path / "c", "Qwen9")


def rates_of(folder, chat):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return made.pass_rates(model, vocabulary.load_tokenizer(folder), chat)


@pytest.mark.parametrize("chat", [False, True])
def test_the_embedded_model_gives_mixed_rewards_on_every_question(chat):
    """Of 8 answers to a question that is answered right with p, all are equal with p⁸ + (1-p)⁸: less than a half."""
    rates = rates_of(ARITHMETIC_DIR, chat)
    assert len(rates) == len(arithmetic())
    assert 0.1 < min(rates) < max(rates) < 0.9


def test_a_course_teaches(tmp_path):
    """A third of the course is enough to tell. What is learnt differs by processor, as it does by seed: of seeds 0 to 3
    the mean is right with 0.25 to 0.30. Whoever knows the answers' frequencies alone is right with 0.06."""
    summary = made.make_model(tmp_path / "m", steps=100)
    answers = Counter(question.answer for question in arithmetic())
    guessing = sum((count / answers.total()) ** 2 for count in answers.values())
    assert summary.pass_mean is not None
    assert summary.chat_pass_mean is not None
    for mean in (summary.pass_mean, summary.chat_pass_mean):
        assert 2 * guessing < mean < made.TEACHER_RIGHT
