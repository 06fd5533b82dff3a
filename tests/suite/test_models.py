"""From a model's name to its folder and its tokenizer; a damaged embedded model is refused by the file's name."""

import shutil

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from functional.runtime.errors import ConfigError
from functional.suite import models
from functional.suite.models import ARITHMETIC, ARITHMETIC_DIR, RANDOM, find_model, find_tokenizer
from functional.suite.sums import SUMS
from functional.suite.tasks import arithmetic
from functional.suite.vocabulary import QWEN3_VOCAB, TINY_VOCAB, wide_tokenizer

pytestmark = pytest.mark.unit


def test_the_embedded_model_is_used_where_it_lies(tmp_path):
    assert find_model(ARITHMETIC, tmp_path, print) == ARITHMETIC_DIR
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def copy(tmp_path, monkeypatch):
    folder = tmp_path / "arithmetic_model"
    shutil.copytree(ARITHMETIC_DIR, folder)
    monkeypatch.setattr(models, "ARITHMETIC_DIR", folder)
    return folder


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_a_pointer(path):
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1020120\n")


def change_line_ends(path):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


DAMAGE = {
    "model.safetensors": [flip_a_bit, put_a_pointer, lambda path: path.write_bytes(b""), lambda path: path.unlink()],
    "generation_config.json": [flip_a_bit, change_line_ends, lambda path: path.unlink()],
    "tokenizer.json": [change_line_ends],
    SUMS: [put_a_pointer, lambda path: path.write_bytes(b""), lambda path: path.unlink()],
}


@pytest.mark.parametrize(("name", "damage"), [(name, damage) for name, all_ in DAMAGE.items() for damage in all_])
def test_a_damaged_file_is_named(copy, tmp_path, name, damage):
    damage(copy / name)
    for use in (lambda: find_model(ARITHMETIC, tmp_path, print), lambda: find_tokenizer(ARITHMETIC)):
        with pytest.raises(ConfigError, match="take the file from the repository again") as refusal:
            use()
        assert str(copy / name) in str(refusal.value)
        assert ("Git LFS pointer" in str(refusal.value)) == (damage is put_a_pointer and name != SUMS)
        assert len(str(refusal.value).splitlines()) == 1


def test_built_in_tokenizers_are_those_that_transformers_loads():
    theirs, ours = AutoTokenizer.from_pretrained(ARITHMETIC_DIR), find_tokenizer(ARITHMETIC)
    assert len(ours) == len(theirs)
    agree(ours, theirs, [question.prompt for question in arithmetic()] + ["é 7<|im_end|>\n", ""])
    theirs = PreTrainedTokenizerFast(tokenizer_object=wide_tokenizer(QWEN3_VOCAB))
    ours = find_tokenizer(RANDOM)
    assert len(ours) == len(theirs) == QWEN3_VOCAB
    agree(ours, theirs, ["Write anything you like about the number 123456.", "Zürich, 12 €!\n", "the<|im_end|>"])


def agree(ours, theirs, texts):
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_model_directory_s_tokenizer_is_loaded_and_one_without_is_refused(tmp_path):
    shutil.copytree(ARITHMETIC_DIR, tmp_path / "m")
    assert find_tokenizer(str(tmp_path / "m")).encode("3+4=", add_special_tokens=False) == [24, 16, 25, 34]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"model_name='.*empty': transformers loads no tokenizer") as refusal:
        find_tokenizer(str(tmp_path / "empty"))
    assert len(str(refusal.value).splitlines()) == 1


def test_a_hub_model_s_tokenizer_is_found_in_the_cache_and_never_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_tokenizer("nobody/has-this-model") is None
    assert find_tokenizer("/no/such/folder") is None
    cached = tmp_path / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    assert find_tokenizer("somebody/tiny") is None
    shutil.copytree(ARITHMETIC_DIR, cached / "snapshots" / ("0" * 40), dirs_exist_ok=True)
    assert len(find_tokenizer("somebody/tiny")) == TINY_VOCAB
