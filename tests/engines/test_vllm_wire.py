"""What is sent to a vLLM server, and what each wrong answer becomes."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from leadline.engines.vllm_spans import ForeignWeights, generate_body
from leadline.engines.vllm_wire import (
    Ask,
    MalformedAnswer,
    joined,
    logprob,
    read_completions,
    refusal,
    request_body,
)
from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt

PROMPT = Prompt(index=7, text="", token_ids=(11, 12, 13))
ASK = Ask(PROMPT, n=2, sampling=Sampling(max_tokens=4), eos_ids=frozenset({2, 3}), vocab_size=260, run_seed=0)


def choice(index: int = 0, **changes: Any) -> dict[str, Any]:
    right = {
        "index": index,
        "text": "?",
        "token_ids": [40, 41, 2],
        "logprobs": {"token_logprobs": [-0.5, -1.5, -0.25]},
        "finish_reason": "stop",
        "stop_reason": 2,
        "prompt_token_ids": [11, 12, 13],
    }
    return {**right, **changes}


def read(*choices: dict[str, Any], ask: Ask = ASK, version: int = 5) -> list[Completion]:
    return read_completions(json.dumps({"choices": choices}).encode(), ask, version)


def one(ask: Ask = ASK, **changes: Any) -> Completion:
    return read(choice(**changes), ask=replace(ask, n=1))[0]


def logprobs_of(values: Any) -> tuple[float, ...]:
    return one(logprobs={"token_logprobs": values}).logprobs


def with_sampling(**changes: Any) -> Ask:
    return replace(ASK, n=1, sampling=ASK.sampling.model_copy(update=changes))


# Requests -------------------------------------------------------------------------------------------------------------


def test_a_request_sets_every_knob_so_that_no_generation_config_fills_one_in() -> None:
    body = request_body(ASK, "policy")
    knobs = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "max_tokens": 4, "stop": [],
    }  # fmt: skip
    assert knobs.items() <= body.items()


def test_a_request_names_the_policys_ends_whatever_the_servers_model_says() -> None:
    body = request_body(with_sampling(stop_token_ids=(99, 3), stop=("##",)), "policy")
    assert (body["stop_token_ids"], body["stop"], body["ignore_eos"]) == ([2, 3, 99], ["##"], True)
    assert (body["skip_special_tokens"], body["include_stop_str_in_output"]) == (False, True)


def test_a_request_goes_on_from_the_tokens_drawn_so_far() -> None:
    body = request_body(ASK.rest(sample=1, drawn=(40, 41)), "policy")
    assert (body["prompt"], body["max_tokens"], body["n"]) == ([11, 12, 13, 40, 41], 2, 1)


def test_seeds_of_prompts_runs_samples_and_continuations_lie_far_apart() -> None:
    asks = [
        *(replace(ASK, prompt=replace(PROMPT, index=i), run_seed=s) for i in range(-2, 3) for s in range(3)),
        *(ASK.rest(sample, (40,) * drawn) for sample in range(3) for drawn in range(1, 3)),
    ]
    seeds = sorted(ask.seed for ask in asks)
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 10_000
    assert seeds[-1] < 2**63


# Answers --------------------------------------------------------------------------------------------------------------


def test_a_right_answer_is_read_token_by_token() -> None:
    assert read(choice(1, token_ids=[2], logprobs={"token_logprobs": [-3]}), choice(0)) == [
        Completion((40, 41, 2), (-0.5, -1.5, -0.25), (5, 5, 5), FinishReason.EOS),
        Completion((2,), (-3.0,), (5,), FinishReason.EOS),
    ]


@pytest.mark.parametrize(
    "value",
    [None, math.nan, -math.inf, math.inf, "-0.5", "NaN", True, [], {}, 0.5, -9999.0, -1e9, {"logprob": -0.5}],
    ids=str,
)
def test_a_value_that_is_no_logprob_is_nan_for_that_token_alone(value: Any) -> None:
    before, odd, after = logprobs_of([-0.5, value, -0.25])
    assert math.isnan(odd)
    assert (before, after) == (-0.5, -0.25)


def test_a_logprob_above_zero_by_rounding_is_zero() -> None:
    assert (logprob(2e-7), logprob(0), logprob(-3)) == (0.0, 0.0, -3.0)


@pytest.mark.parametrize(
    "logprobs",
    [
        None, [], "x", {}, {"token_logprobs": None}, {"token_logprobs": []}, {"token_logprobs": [-0.5, -1.5]},
        {"token_logprobs": [None, -0.5, -1.5, -0.25]}, {"token_logprobs": {"0": -0.5}},
    ],
    ids=str,
)  # fmt: skip
def test_logprobs_that_cannot_be_told_apart_are_all_nan_and_the_tokens_stay(logprobs: Any) -> None:
    completion = one(logprobs=logprobs)
    assert completion.token_ids == (40, 41, 2)
    assert all(map(math.isnan, completion.logprobs))


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("ids", [[], None])
def test_a_choice_without_tokens_is_a_failed_rollout(ids: Any, reason: str) -> None:
    completion = one(token_ids=ids, logprobs={"token_logprobs": []}, finish_reason=reason)
    assert completion == Completion((), (), (), FinishReason.ABORT)


@pytest.mark.parametrize("token", [260, -1, 10**30])
def test_a_token_beyond_the_vocabulary_says_that_another_model_is_served(token: int) -> None:
    with pytest.raises(EngineError, match=f"drew token {token}, but the policy knows 260 tokens"):
        one(token_ids=[40, token, 2])


@pytest.mark.parametrize("ids", [[40, "41", 2], [40, 41.0, 2], [True], "40", {"0": 40}])
def test_token_ids_that_are_no_integers_are_malformed(ids: Any) -> None:
    with pytest.raises(MalformedAnswer, match="no list of integers"):
        one(token_ids=ids)


def test_an_answer_without_token_ids_is_never_tokenised_again() -> None:
    wrong = choice()
    del wrong["token_ids"]
    with pytest.raises(EngineError, match="without token_ids"):
        read(wrong, ask=replace(ASK, n=1))


@pytest.mark.parametrize("indices", [[0], [0, 1, 2], [0, 0], [1, 2], []])
def test_another_number_of_choices_is_malformed(indices: list[int]) -> None:
    with pytest.raises(MalformedAnswer, match=r"of n = 2"):
        read(*(choice(i) for i in indices))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html><body>502 Bad Gateway</body></html>", b'{"choices": [{"index": 0, "token_i', b"[]", b"null",
        b'{"error": "no"}', b'{"choices": null}', b'{"choices": ["a", "b"]}', b'{"choices": [{}, {}]}', b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_body_that_is_no_answer_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        read_completions(body, ASK, 0)


def test_a_changed_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match=r"drew from the prompt \[1, 11, 12, 13\]"):
        one(prompt_token_ids=[1, 11, 12, 13])


# vLLM's own route ------------------------------------------------------------------------------------------------------


def generated(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": t, "logprob": x, "top_logprobs": []} for t, x in ((40, -0.5), (41, -1.5), (2, -0.25))]
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 3}]
    return choice(logprobs={"content": content}, weight_versions=spans, prompt_token_ids=None) | changes


def read_generated(named: dict[str, int] | None = None, **changes: Any) -> Completion:
    body = json.dumps({"choices": [generated(**changes)], "prompt_token_ids": [11, 12, 13]}).encode()
    return read_completions(body, replace(ASK, n=1), 5, {"a": 3, "b": 4} if named is None else named)[0]


def test_vllms_own_route_gives_the_same_completion_with_a_version_for_each_token() -> None:
    assert read_generated() == Completion((40, 41, 2), (-0.5, -1.5, -0.25), (3, 4, 4), FinishReason.EOS)


def test_a_request_for_vllms_own_route_sets_every_knob_too() -> None:
    body, plain = generate_body(request_body(ASK, "policy")), request_body(ASK, "policy")
    assert (body["model"], body["token_ids"], body["return_token_ids"]) == ("policy", [11, 12, 13], True)
    rest = {"model", "prompt", "echo", "stream", "return_token_ids", "return_tokens_as_token_ids"}
    assert body["sampling_params"] == {name: value for name, value in plain.items() if name not in rest}


@pytest.mark.parametrize(
    "content",
    [None, "x", [], [{"token_id": 40, "logprob": -0.5}], [1, 2, 3]],
    ids=str,
)
def test_logprobs_of_vllms_own_route_that_cannot_be_told_apart_are_nan(content: Any) -> None:
    completion = read_generated(logprobs={"content": content})
    assert completion.token_ids == (40, 41, 2)
    assert all(map(math.isnan, completion.logprobs))


def test_a_logprob_of_another_token_is_nan() -> None:
    content = [{"token_id": t, "logprob": -0.5, "top_logprobs": []} for t in (40, 99, 2)]
    assert [math.isnan(x) for x in read_generated(logprobs={"content": content}).logprobs] == [False, True, False]


@pytest.mark.parametrize(
    "spans",
    [
        None, [], "ab", [{"version": "a", "start": 0, "end": 2}], [{"version": "a", "start": 0, "end": 4}],
        [{"version": "a", "start": 1, "end": 3}], [{"version": "a", "start": 0}], [{"version": "a", "start": 0, "end": 0}],
        [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 1, "end": 3}],
    ],
    ids=str,
)  # fmt: skip
def test_spans_that_do_not_cover_the_tokens_one_after_the_other_are_malformed(spans: Any) -> None:
    with pytest.raises(MalformedAnswer, match="do not cover its 3 tokens"):
        read_generated(weight_versions=spans)


def test_tokens_of_weights_without_one_of_our_names_are_foreign() -> None:
    with pytest.raises(ForeignWeights, match="'b'"):
        read_generated(named={"a": 3})


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_reason", [None, 3])
def test_a_secondary_eos_is_eos(stop_reason: int | None) -> None:
    assert one(token_ids=[40, 41, 3], stop_reason=stop_reason).finish_reason is FinishReason.EOS


def test_a_stop_token_is_stop() -> None:
    ask = with_sampling(stop_token_ids=(99,))
    assert one(ask, token_ids=[40, 41, 99], stop_reason=99).finish_reason is FinishReason.STOP


def test_a_stop_string_is_stop() -> None:
    assert one(with_sampling(stop=("x",)), token_ids=[1, 1, 9], stop_reason="x").finish_reason is FinishReason.STOP


def test_the_limit_is_length_and_an_eos_at_the_limit_is_eos() -> None:
    four = {"token_logprobs": [-1.0] * 4}
    assert one(token_ids=[9, 9, 9, 9], finish_reason="length", logprobs=four).finish_reason is FinishReason.LENGTH
    assert one(token_ids=[9, 9, 9, 2], finish_reason="stop", logprobs=four).finish_reason is FinishReason.EOS


def test_an_abort_keeps_its_tokens() -> None:
    assert one(token_ids=[40, 41, 9], finish_reason="abort").finish_reason is FinishReason.ABORT
    assert one(token_ids=[40, 41, 2], finish_reason="abort").finish_reason is FinishReason.EOS


@pytest.mark.parametrize("reason", [None, "error", "tool_calls", "repetition", 3])
def test_an_unknown_finish_reason_is_malformed(reason: Any) -> None:
    with pytest.raises(MalformedAnswer, match="finish_reason"):
        one(finish_reason=reason)


def test_an_end_of_the_servers_own_is_refused() -> None:
    with pytest.raises(EngineError, match=r"ended a completion at token 50 \(stop_reason None\)"):
        one(token_ids=[40, 41, 50], stop_reason=None)


def test_a_server_that_goes_on_after_eos_is_refused() -> None:
    with pytest.raises(EngineError, match="went on after token 2"):
        one(token_ids=[40, 2, 41, 42], finish_reason="length")


def test_a_limit_below_max_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match=r"max_tokens is 4, but .* cut a completion of prompt 7 off after 3 tokens"):
        one(token_ids=[40, 41, 42], finish_reason="length")


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(EngineError, match="drew 5 tokens where max_tokens was 4"):
        one(token_ids=[40, 41, 42, 43, 44], finish_reason="length")


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (400, b"This model's maximum context length is 64 tokens.", "--max-model-len"),
        (400, b'{"error": {"message": "Requested sample logprobs of 260, max allowed: 20"}}', "--max-logprobs"),
        (401, b"Unauthorized", "VLLM_API_KEY"),
        (404, b"The model `policy` does not exist.", "engine.model_name"),
        (422, b"Input should be a valid integer", "Change the setting that it names"),
    ],
)
def test_a_4xx_is_shown_with_its_body_and_what_to_change(status: int, body: bytes, advice: str) -> None:
    message = str(refusal("http://host:1", status, body, ASK, "policy"))
    assert f"HTTP {status}" in message
    assert body.decode()[:40] in message
    assert advice in message


def test_a_400_that_means_nan_weights_says_so() -> None:
    body = b'{"error": {"message": "Out of range float values are not JSON compliant", "type": "BadRequestError"}}'
    assert "weights it holds are NaN" in str(refusal("http://host:1", 400, body, ASK, "policy"))


# Continuations --------------------------------------------------------------------------------------------------------


class Letters:
    """Token t is the letter chr(t)."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(map(chr, ids))


def letters(text: str, version: int, reason: FinishReason) -> Completion:
    ids = tuple(map(ord, text))
    return Completion(ids, (-1.0 * version,) * len(ids), (version,) * len(ids), reason)


def test_a_continued_completion_keeps_logprob_and_version_of_each_token() -> None:
    whole = joined(letters("ab", 1, FinishReason.ABORT), letters("c", 2, FinishReason.EOS), (), Letters())
    assert whole == Completion((97, 98, 99), (-1.0, -1.0, -2.0), (1, 1, 2), FinishReason.EOS)


@pytest.mark.parametrize(
    ("after", "text", "reason"),
    [
        ("Dxyz", "..END", FinishReason.STOP),
        ("xyzEND", "..ENxyzEND", FinishReason.STOP),
        ("xEN", "..ENxEN", FinishReason.LENGTH),
    ],
    ids=["across", "behind", "never"],
)
def test_a_stop_string_across_the_seam_ends_the_completion(after: str, text: str, reason: FinishReason) -> None:
    said = FinishReason.STOP if after.endswith("END") else FinishReason.LENGTH
    whole = joined(letters("..EN", 1, FinishReason.ABORT), letters(after, 2, said), ("END",), Letters())
    assert ("".join(map(chr, whole.token_ids)), whole.finish_reason) == (text, reason)
