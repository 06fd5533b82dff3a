"""Validation: when, on which questions, and what it finds."""

import pytest

from functional.runtime.recipe.model import DataConfig, GrpoConfig
from functional.runtime.rollout.completion import Completion
from functional.suite.models import ARITHMETIC_DIR, find_tokenizer
from functional.suite.tasks import arithmetic, held_out, make_task
from functional.suite.validation import Validation, has_arrived, is_due, judge, validation_prompts


@pytest.fixture(scope="module")
def tokenizer():
    return find_tokenizer(str(ARITHMETIC_DIR))


def steps(**given):
    grpo = GrpoConfig(max_num_steps=7, **given)
    return [step for step in range(8) if is_due(grpo, step)]


def test_when():
    assert steps() == []
    assert steps(val_period=3) == [3, 6]
    assert steps(val_period=2, val_start_at=4) == [4, 6]
    assert steps(val_period=3, val_at_start=True, val_at_end=True) == [0, 3, 6, 7]


def test_held_out_questions_are_never_trained_on(tokenizer):
    train, kept = held_out(arithmetic(), 0.2, seed=1)
    assert (len(train), len(kept)) == (124, 31)
    assert {q.prompt for q in train}.isdisjoint(q.prompt for q in kept)
    assert held_out(arithmetic(), 0.2, seed=1)[1] == kept
    assert held_out(arithmetic(), 0.2, seed=2)[1] != kept
    task = make_task("arithmetic", tokenizer, 124, 1, held=0.2)
    assert {prompt.text for prompt in task.prompts(1)} == {q.prompt for q in train}
    data = DataConfig(split_validation_size=0.2)
    prompts = validation_prompts(data, GrpoConfig(seed=1), tokenizer)
    assert {prompt.text for prompt in prompts} == {q.prompt for q in kept}
    assert len(validation_prompts(data, GrpoConfig(seed=1, max_val_samples=5), tokenizer)) == 5


def test_a_file_of_its_own(tmp_path, tokenizer):
    file = tmp_path / "validation.jsonl"
    file.write_text('{"question": "1+1=", "truth": "2"}\n')
    data = DataConfig.model_validate(
        {"validation": {"dataset_name": str(file), "input_key": "question", "output_key": "truth"}}
    )
    (prompt,) = validation_prompts(data, GrpoConfig(), tokenizer)
    assert (prompt.text, prompt.answer) == ("1+1=", "2")


def completion(tokenizer, text, problem=None):
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return Completion("r", (1,), ids, (0.0,) * len(ids), 1, 0, None, 0.0, 0.0, problem)


def test_figures(tokenizer):
    task = make_task("arithmetic", tokenizer, 2, 0)
    prompts = task.prompts(1)
    right, wrong = (completion(tokenizer, str(prompts[0].answer)), completion(tokenizer, "99"))
    broken = completion(tokenizer, str(prompts[1].answer), "no log-probs")
    found = judge(4, prompts, [right, wrong, wrong, broken], task)
    assert (found.accuracy, found.pass_k, found.step, found.prompts, found.generations) == (0.25, 0.5, 4, 2, 2)
    assert found.metrics().keys() == {"accuracy", "avg_length", "pass_k"}
    assert judge(4, prompts, [right, wrong], task).pass_k is None


def test_it_ends_a_run_once_the_metric_is_there():
    grpo = GrpoConfig(stop_at_validation_metric="accuracy", stop_at_validation_threshold=0.5)
    low, high = (Validation(1, 1, 1, accuracy, None, 1.0).metrics() for accuracy in (0.4, 0.5))
    assert (has_arrived(grpo, low), has_arrived(grpo, high), has_arrived(grpo, {})) == (False, True, False)
    assert not has_arrived(GrpoConfig(), high)
