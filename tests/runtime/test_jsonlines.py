"""Rows are in the file once `append` returns, one a line, behind what was there."""

import json
import os

import pytest

from functional.runtime.jsonlines import JsonLines


@pytest.mark.parametrize("synced", [False, True])
def test_rows_are_there_before_the_file_is_closed(tmp_path, monkeypatch, synced):
    syncs = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 0}\n')
    with JsonLines(path, synced=synced) as lines:
        lines.append({"n": 1, "text": "a\nb"})
        assert len(path.read_text().splitlines()) == 2
        lines.append({"n": 2}, {"n": 3})
        assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    assert len(syncs) == (2 if synced else 0)
