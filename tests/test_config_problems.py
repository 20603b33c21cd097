"""Each pair of settings that contradict each other, the near misses beside them."""

import re
from typing import Any

import pytest

from leadline.config import parse_config
from leadline.config_problems import CHECKS, contradictions
from leadline.errors import ConfigError
from tests.builders import settings
from tests.test_config import HOUSE_FORM, values

TWO = [{"name": "length"}, {"name": "a.b:length"}]

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "_half_precision": (
        {"model": {"name": "tiny", "dtype": "float16"}},
        "model.dtype is 'float16', but gradients of that dtype underflow",
        {"model": {"name": "tiny", "dtype": "bfloat16"}, "engine": {"dtype": "float16"}},
    ),
    "_greedy_training": (
        {"sampling": {"temperature": 0}, "rollout": {"group_size": 5}},
        "sampling.temperature is 0, but a greedy group holds the same completion 5 times",
        {"sampling": {"temperature": 0.01}, "eval": {"temperature": 0}},
    ),
    "_minibatches_split_groups": (
        {"optimizer": {"minibatches": 3}, "rollout": {"groups_per_step": 8}},
        "optimizer.minibatches is 3, but rollout.groups_per_step is 8",
        {"optimizer": {"minibatches": 4}, "rollout": {"groups_per_step": 8}},
    ),
    "_overlong_fits": (
        {"objective": {"overlong_buffer": 16}, "sampling": {"max_tokens": 16}},
        "objective.overlong_buffer is 16, but sampling.max_tokens is 16",
        {"objective": {"overlong_buffer": 15}, "sampling": {"max_tokens": 16}},
    ),
    "_epsilon_is_small": (
        {"objective": {"advantage_epsilon": 1e-2}},
        "objective.advantage_epsilon is 0.01, but a group's reward std is often of that size",
        {"objective": {"advantage_epsilon": 9e-3}},
    ),
    "_lower_clip_acts": (
        {"objective": {"clip_low": 1.0}},
        "objective.clip_low is 1.0, but the ratio is clipped at 1 - clip_low",
        {"objective": {"clip_low": 0.99}},
    ),
    "_importance_bounds_are_ordered": (
        {"objective": {"importance_low": 2.0}},
        "objective.importance_low is 2.0, but importance_high is 2.0",
        {"objective": {"importance_low": 1.9}},
    ),
    "_replay_is_older_than_the_queue": (
        {"rollout": {"max_staleness": 2, "replay_max_staleness": 2}},
        "rollout.replay_max_staleness is 2, but rollout.max_staleness is 2",
        {"rollout": {"max_staleness": 2, "replay_max_staleness": 3}},
    ),
    "_replay_is_weighted": (
        {"rollout": {"replay_max_staleness": 3}, "objective": {"importance_action": "off"}},
        "rollout.replay_max_staleness is 3, but objective.importance_action is 'off'",
        {"rollout": {"max_staleness": 3}, "objective": {"importance_action": "off"}},
    ),
    "_stalls_are_told_before_they_end_the_run": (
        {"run": {"stall_warning_s": 60.0, "stall_limit_s": 30.0}},
        "run.stall_warning_s is 60, but run.stall_limit_s is 30",
        {"run": {"stall_warning_s": 30.0, "stall_limit_s": 30.0}},
    ),
    "_servers_have_their_time": (
        {"run": {"stall_limit_s": 500.0}, "engine": {"kind": "vllm", "request_timeout_s": 500.0}},
        "run.stall_limit_s is 500, but engine.request_timeout_s and engine.patience_s let a run wait 500 s",
        {"run": {"stall_limit_s": 501.0}, "engine": {"kind": "vllm", "request_timeout_s": 500.0}},
    ),
    "_labels_unique": (
        {"rewards": TWO},
        "rewards has 'length' twice, but logs name rewards by label",
        {"rewards": [TWO[0], {**TWO[1], "label": "mine"}]},
    ),
    "_weights_not_all_zero": (
        {"rewards": [{"name": "length", "weight": 0}]},
        "rewards has weight 0 everywhere, but the reward is their weighted sum",
        {"rewards": [{"name": "length", "weight": 0}, {"name": "exact_match", "weight": -1}]},
    ),
    "_urls_need_vllm": (
        {"engine": {"urls": ["http://a:8000"]}},
        "engine.urls is ['http://a:8000'], but engine.kind is 'hf'",
        {"engine": {"urls": ["http://a:8000"], "kind": "vllm"}},
    ),
    "_model_name_needs_vllm": (
        {"engine": {"kind": "vllm", "model_name": "policy"}},
        "engine.model_name is 'policy', but without engine.urls",
        {"engine": {"kind": "vllm", "model_name": "policy", "urls": ["http://a:8000"]}},
    ),
    "_pushed_adapters_exist": (
        {"engine": {"kind": "vllm", "lora": "push"}},
        "engine.lora is 'push', but model.lora_rank is 0",
        {"engine": {"kind": "vllm", "lora": "push"}, "model": {"name": "tiny", "lora_rank": 4}},
    ),
    "_kv_cache_is_ours": (
        {"engine": {"kind": "vllm", "kv_cache_gib": 2.0, "urls": ["http://a:8000"]}},
        "engine.kv_cache_gib is 2, but the servers of engine.urls were started with theirs",
        {"engine": {"kind": "vllm_inprocess", "kv_cache_gib": 2.0}},
    ),
    "_urls_are_addresses": (
        {"engine": {"urls": ["https://a", "b:8000"], "kind": "vllm"}},
        "engine.urls has 'b:8000', but an address begins with http:// or https://",
        {"engine": {"urls": ["https://a", "http://b:8000"], "kind": "vllm"}},
    ),
    "_improvement_needs_prompts": (
        {"eval": {"require_improvement": True, "prompts": 0}},
        "eval.require_improvement is true, but eval.prompts is 0",
        {"eval": {"require_improvement": True, "prompts": 1}},
    ),
}


def test_every_check_has_a_case() -> None:
    assert [check.__name__ for check in CHECKS] == list(CONTRADICTIONS)


@pytest.mark.parametrize("check", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused_before_anything_is_loaded(check: str) -> None:
    sections, message, near_miss = CONTRADICTIONS[check]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_config(values(**sections))
    assert HOUSE_FORM.match(str(caught.value))
    assert contradictions(parse_config(values(**near_miss))) == []


def test_the_overlong_penalty_takes_its_label_only_where_it_is_on() -> None:
    rewards = [{"name": "mine.py:overlong"}]
    parse_config(values(rewards=rewards))
    with pytest.raises(ConfigError, match="'overlong' twice"):
        parse_config(values(rewards=rewards, objective={"overlong_buffer": 8}))


def test_an_engine_that_takes_no_adapters_and_one_without_a_cache_are_refused_what_only_vllm_has() -> None:
    with pytest.raises(ConfigError, match=r"engine.lora is 'push', but engine.kind is 'vllm_inprocess'"):
        settings(engine={"kind": "vllm_inprocess", "lora": "push"}, model={"name": "tiny", "lora_rank": 4})
    with pytest.raises(ConfigError, match=r"engine.kv_cache_gib is 2, but only vLLM has such a cache"):
        settings(engine={"kv_cache_gib": 2.0})


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings(sampling={"temperature": 0}, objective={"clip_low": 1.5})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "sampling.temperature",
        "objective.clip_low",
    ]
