"""The directories made on the spot: the same bytes twice, complete, and taught just enough."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from functional.suite import model as made
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
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == AutoConfig.from_pretrained(out).vocab_size == made.TINY_VOCAB
    message = [{"role": "user", "content": "3+4="}]
    assert tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == made.chat_prompt(
        "3+4="
    )
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def test_tiny_tokenizer_is_one_token_a_character():
    tokenizer = made.tiny_tokenizer()
    assert tokenizer.get_vocab_size() == made.TINY_VOCAB
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é").tokens == [made.UNKNOWN]
    assert tokenizer.encode("7<|im_end|>").ids[1] == tokenizer.token_to_id(made.TURN_END)


def test_wide_tokenizer_knows_every_id():
    tokenizer = made.wide_tokenizer(151936)
    assert tokenizer.get_vocab_size() == 151936
    assert tokenizer.token_to_id(made.END_OF_TEXT) == 151643
    assert tokenizer.token_to_id(made.TURN_END) == 151645
    ids = [300, 20000, 151642, 77777]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert tokenizer.decode(tokenizer.encode("Zürich, 12 €!\n").ids) == "Zürich, 12 €!\n"
    assert all(tokenizer.id_to_token(i) for i in range(151936))


def test_random_model_has_the_shape_s_config_and_the_same_bytes_twice(tmp_path, monkeypatch):
    small = made.SHAPES["Qwen3-0.6B"] | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    monkeypatch.setitem(made.SHAPES, "small", small)
    summary = made.random_model(tmp_path / "a", "small")
    made.random_model(tmp_path / "b", "small")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert sum(p.numel() for p in model.parameters()) == summary.params
    with pytest.raises(ValueError, match=r"want one of Qwen3-0\.6B"):
        made.random_model(tmp_path / "c", "Qwen9")


@pytest.mark.road
def test_after_the_course_rewards_are_mixed_on_every_question(tmp_path):
    summary = made.make_model(tmp_path / "m")
    assert summary.pass_min is not None
    assert summary.pass_max is not None
    assert 0.3 < summary.pass_min < summary.pass_max < 0.75
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    rates = made.pass_rates(model, tokenizer, chat=True)
    assert len(rates) == len(arithmetic())
    assert 0.25 < min(rates) < max(rates) < 0.85
