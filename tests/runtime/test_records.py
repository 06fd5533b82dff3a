"""Rollout records survive a crash: whole lines are kept, a torn last one is passed over, any other is an error."""

import pytest

from functional.runtime.rollout.records import RecordWriter, RolloutRecord, read_records


def record(rollout):
    return RolloutRecord(
        run="r", step=1, group=0, rollout=rollout, attempt=1, policy_version=0, request_id=f"id{rollout}",
        instance_id=7, sent_at=1.0, answered_at=2.0, prompt_token_ids=(1,), token_ids=(2, 3), logprobs=(-0.1, -0.2),
        max_tokens=4, truncated=False, reward=1.0, advantage=0.5, accepted=True, reason=None,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with RecordWriter(path) as writer:
        writer.write([record(0), record(1)])
    return path


def test_what_was_written_is_read_back(path):
    with RecordWriter(path) as writer:
        writer.write([record(2)])
    read = read_records(path)
    assert [r["rollout"] for r in read] == [0, 1, 2]
    assert read[0]["logprobs"] == [-0.1, -0.2]


def test_a_torn_last_line_is_tolerated(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [r["rollout"] for r in read_records(path)] == [0]


def test_a_broken_line_in_the_middle_is_not(path):
    lines = path.read_text().splitlines()
    path.write_text(lines[0][:30] + "\n" + lines[1] + "\n")
    with pytest.raises(ValueError, match=r"rollouts.jsonl:1: broken record"):
        read_records(path)
