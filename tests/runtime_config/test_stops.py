"""Stops of a recipe are sent with each request."""

from functional.runtime.rollout import Sampling, request_body


def test_stops_are_sent():
    body = request_body((5, 6), Sampling(8, stop_token_ids=(3,), stop_strings=("a", "b")), None)
    assert body["stop"] == ["a", "b"]
    assert body["stop_token_ids"] == [3]
    assert {"stop", "stop_token_ids"}.isdisjoint(request_body((5, 6), Sampling(8), None))
