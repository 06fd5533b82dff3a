"""What each request says of sampling: the recipe's stops, and a neutral value of everything else."""

from functional.runtime.rollout.completion import NEUTRAL, Sampling, request_body


def test_stops_are_sent():
    body = request_body("m", (5, 6), Sampling(8, stop_token_ids=(3,), stop_strings=("a", "b")), None)
    assert body["stop"] == ("a", "b")
    assert body["stop_token_ids"] == (3,)
    assert {"stop", "stop_token_ids"}.isdisjoint(request_body("m", (5, 6), Sampling(8), None))


def test_nothing_is_left_for_anybodys_defaults_to_fill_in():
    body = request_body("m", (5, 6), Sampling(8, temperature=0.7), None)
    assert {name: body[name] for name in (*NEUTRAL, "top_p", "top_k", "temperature", "max_tokens", "n")} == {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "temperature": 0.7,
        "max_tokens": 8,
        "n": 1,
    }
    assert "seed" not in body, "a seed of the request's own would make equal prompts give equal samples"


def test_top_p_and_top_k_are_the_samplings():
    body = request_body("m", (5, 6), Sampling(8, top_p=0.9, top_k=50), None)
    assert (body["top_p"], body["top_k"]) == (0.9, 50)
