"""A reward function, examined: canaries, then what it makes of real completions."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from leadline.errors import RewardError
from leadline.probes.code.canaries import CHECKS, TASKS, WRONG, Bench, finding, found_form, steady
from leadline.probes.code.findings import Finding, Report
from leadline.probes.code.group_signal import GROUP_SIZES, Distribution
from leadline.probes.code.load import where
from leadline.probes.code.reward_call import RewardCall, Task, TooSlow, understood
from leadline.probes.code.samples import RealSample, read_samples

NO_SIGNAL = 0.8
"""A larger share of groups without signal is a finding: DAPO's dynamic sampling was made for it."""


def examine_reward(
    function: Callable[..., Any], target: str, given: Sequence[str], samples_path: Path | None
) -> Report:
    """The report on a reward function. Raises ConfigError: it could not be called; DataError: the samples."""
    samples = read_samples(samples_path) if samples_path else []
    task, wrong = _task(samples)
    call = understood(function, given, task.columns)
    call, problem = _calling(call, task)
    findings: list[Finding] = [problem] if problem else []
    facts: dict[str, str] = {}
    if problem is None:
        bench = _bench(call, task, wrong, findings)
        if bench is not None:
            findings += steady(bench)
            if not {"not_deterministic", "depends_on_the_batch"} & {one.name for one in findings}:
                findings += [found for check in CHECKS for found in check(bench)]
            facts["format"] = bench.form.replace("\n", "\\n").format("ANSWER")
            facts["canaries"] = f"right {bench.right:g}, wrong {bench.wrong:g}, empty {bench.empty:g}"
    if samples and problem is None:
        distribution, source = _distribution(call, samples)
        facts |= _distribution_facts(distribution, source)
        findings += _distribution_findings(distribution)
    errors = sum(one.level == "error" for one in findings)
    verdict = f"{errors} fault{'s' * (errors != 1)}." if errors else "Bears every canary."
    style = "conversational messages" if call.chat else "texts"
    form = f"{'all completions of a group at once' if call.batched else 'one completion at a time'}, as {style}"
    return Report(target, "reward", where(function), [call.words, form], verdict, findings, facts=facts)


def _task(samples: Sequence[RealSample]) -> tuple[Task, str]:
    """The first sample with a known answer, or a built-in sum."""
    known = next((sample for sample in samples if sample.gold), None)
    if known is None:
        columns = dict(samples[0].columns) if samples else {}
        return dataclasses.replace(TASKS[0], columns=columns | _gold_columns(TASKS[0].gold)), WRONG[0]
    assert known.gold is not None
    wrong = next(answer for answer in (*WRONG, "none at all") if known.gold not in answer and answer not in known.gold)
    return Task(known.prompt, known.gold, known.columns), wrong


def _gold_columns(gold: str) -> dict[str, str]:
    return dict.fromkeys(("answer", "ground_truth", "solution", "target"), gold)


def _calling(call: RewardCall, task: Task) -> tuple[RewardCall, Finding | None]:
    """The call as texts or, if that fails and messages do not, as messages; else what is wrong with it."""
    error: Exception | None = None
    for one in (call, dataclasses.replace(call, chat=True)):
        try:
            one.scores(task, ["The answer is 5.", "", "x"] if call.batched else ["The answer is 5."])
            return one, None
        except Exception as raised:  # the user's code runs here
            error = error or raised
    assert error is not None
    return call, _wrong_return(call, task, error)


def _wrong_return(call: RewardCall, task: Task, error: Exception) -> Finding:
    if isinstance(error, TooSlow):
        return finding(
            "error", "hangs", "It does not return on plain texts", "No step ends.", "Bound its work.", str(error)
        )
    if "main thread" in str(error):
        return finding(
            "error",
            "not_thread_safe",
            "It only works in the main thread",
            "Trainers call rewards from threads: every call raises, and is often taken for a reward of 0.",
            "Use no signal.alarm: bound the work, or run it in a process with a timeout (math_verify: "
            "parsing_timeout=None, timeout_seconds=None).",
            f"{type(error).__name__}: {error}",
        )
    if not isinstance(error, RewardError):
        return finding(
            "error",
            "raises",
            "It raises on plain texts",
            "Nothing can be scored.",
            "Check how it was called (above); give values with --arg NAME=VALUE.",
            f"{type(error).__name__}: {str(error)[:200]}",
        )
    returned = call.raw(task, ["The answer is 5.", "", "x"] if call.batched else ["The answer is 5."])
    scalar = call.batched and (isinstance(returned, int | float) or getattr(returned, "shape", None) == ())
    return finding(
        "error",
        "scalar_for_vector" if scalar else "returned_wrong_type",
        "It returns one number for several completions" if scalar else "It returns something else than numbers",
        "By broadcasting every completion would get the same reward, or the trainer stops.",
        "Return one number per completion, in their order.",
        str(error).split(". ")[0],
    )


def _bench(call: RewardCall, task: Task, wrong: str, findings: list[Finding]) -> Bench | None:
    try:
        return found_form(call, task, wrong)
    except Exception as error:
        findings.append(
            finding(
                "error",
                "raises",
                "It raises on an ordinary answer",
                "A trainer stops, or counts the rollout as failed.",
                "Catch what parsing raises, and return the reward of a wrong answer.",
                f"{type(error).__name__}: {str(error)[:200]}",
            )
        )
        return None


# Real completions -----------------------------------------------------------------------------------------------------


def _distribution(call: RewardCall, samples: Sequence[RealSample]) -> tuple[Distribution, str]:
    """By prompt: scored now where the answers are known, else as recorded."""
    by_prompt: dict[str, list[float]] = {}
    scored = all(sample.gold is not None for sample in samples)
    for sample in samples:
        reward = _scored(call, sample) if scored else sample.reward
        if reward is not None and reward == reward:
            by_prompt.setdefault(sample.prompt, []).append(reward)
    return Distribution(list(by_prompt.values())), "scored now" if scored else "as recorded: no gold answers are there"


def _scored(call: RewardCall, sample: RealSample) -> float | None:
    try:
        (value,) = call.scores(Task(sample.prompt, str(sample.gold), sample.columns), [sample.completion])
        return value
    except Exception:  # counted as no reward; the canaries say why
        return None


def _distribution_facts(distribution: Distribution, source: str) -> Mapping[str, str]:
    values = distribution.values
    shown = ", ".join(f"{value:g} ({share:.0%})" for value, share in values[:5]) + (" ..." if len(values) > 5 else "")
    sizes = ", ".join(f"G={size} {distribution.without_signal(size):.0%}" for size in GROUP_SIZES)
    prompts = len(distribution.rewards)
    return {
        "rewards": f"{distribution.count} completions of {prompts} prompts ({source}): {shown or 'none'}",
        "groups without signal": sizes,
    }


def _distribution_findings(distribution: Distribution) -> Iterator[Finding]:
    share = distribution.without_signal(8)
    if share > NO_SIGNAL:
        larger = next((size for size in GROUP_SIZES if distribution.without_signal(size) <= NO_SIGNAL), None)
        yield finding(
            "note",
            "little_signal",
            f"{share:.0%} of groups of 8 will have equal rewards",
            "They teach nothing.",
            f"A group size of {larger}, easier or harder prompts, or partial credit."
            if larger
            else "Other prompts, or partial credit: a larger group does not help.",
        )
