import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    ENTROPY,
    ZERO_SIGNAL,
    no_signal,
)
from leadline.doctor.view import View


class NearGreedySampling(Rule):
    """Completions of a group are near copies of each other.

    ## Symptom
    Duplicates within a group, an entropy of the sampler close to 0 from the first step, reward spread about 0.

    ## Cause
    The temperature is low, or a checkpoint's `generation_config` (low temperature, top_k) overrides it: values equal to a
    library's default are often taken for unset.

    ## Fix
    Set `sampling.temperature` to 1.0, `sampling.top_p` to 1 and `sampling.top_k` to 0 so that they reach the engine; in
    transformers, clear the model's `generation_config`.

    ## References
    huggingface/trl issue 5783 (8 completions, 4 distinct). Entropy below 0.05 nats in the first rows and fewer than 70 % distinct
    completions are leadline's choice.
    """

    id = "LL209"
    name = "near-greedy-sampling"
    severity = "error"
    explains = ("zero-reward-variance-within-group",)
    confirm = "Count distinct completions per group."
    sick = (
        RunLog.from_columns({"policy/entropy": [0.01, 0.012, 0.01], "rollout/zero_signal_fraction": [0.9, 0.95, 0.9]}),
        RunLog([], {"sampling": {"temperature": 0.1}}),
        RunLog([{"step": 1, "rows": 8, "unique_md5": 4}]),
    )
    healthy = (
        RunLog.from_columns({"policy/entropy": [0.4, 0.2, 0.01], "rollout/zero_signal_fraction": [0.3, 0.5, 0.9]}),
        RunLog([], {"sampling": {"temperature": 0.6}}),
        RunLog([{"step": 1, "rows": 8, "unique_md5": 8}]),
    )
    limit = 0.05

    def examine(self, run: View) -> list[Evidence]:
        found = []
        early = run.first_of(*ENTROPY).finite.head(5)
        quiet = len(early) and early.median < self.limit and early.first < self.limit
        if quiet and (len(no_signal(run)) or run.first_of(*ZERO_SIGNAL).median > 0.6):
            note = "The entropy was {value} nats from the first row on, and groups hardly disagree."
            found.append(run.fact(early, early.median, self.limit, note, since=int(early.steps[0])))
        for name, distinct in run.measured(r"uniq|distinct"):
            for _, total in run.measured(
                r"^(n\b|rows|samples|num samples|completions|n completions|group size|num generations)"
            ):
                steps, few, all_ = paired(distinct, total)
                if len(steps) and np.min(few / np.maximum(all_, 1)) < 0.7:
                    worst = int(np.argmin(few / np.maximum(all_, 1)))
                    note = f"{name}: {{value}} of {number(float(all_[worst]))} completions are distinct."
                    found.append(run.fact(distinct, float(few[worst]), float(all_[worst]), note))
        return found + probe.above(run, r"duplicat", 0.3, "{name} is {value}.")

    def lint(self, run: View) -> list[Evidence]:
        found = []
        if 0 <= run.number("sampling.temperature") < 0.3:
            found.append(
                run.chosen(
                    "sampling.temperature", 0.3, "{option} is {value}: a group is the same text G times.", "strong"
                )
            )
        if run.number("sampling.top_k") == 1 or run.number("sampling.top_p") < 0.2:
            found.append(run.chosen("sampling.top_k", 1, "Sampling keeps the most probable token only.", "strong"))
        if run.says(r"do_sample\W*= ?(false|0)\b") or any(v is False for n, v in run.raw("do_sample")):
            found.append(Evidence("do_sample", 0, 0.0, 1.0, "do_sample is false: decoding is greedy."))
        return found

    def measure(self, run: View) -> list[Evidence]:
        first = min((sample.get("step", 0) for sample in run.run.samples), default=0)
        groups = [group for group in rollouts.groups(run) if group[0].get("step", 0) == first]
        # short answers agree by nature, and at the end of a run the policy may be sure: only long texts, at the start
        texts = [[rollouts.text(sample) for sample in group] for group in groups]
        texts = [group for group in texts if np.median([len(text) for text in group]) >= 80]
        total, distinct = sum(map(len, texts)), sum(len(set(group)) for group in texts)
        if total < rollouts.LEAST or distinct >= 0.7 * total or first > 20:
            return []
        note = f"Of {total} dumped completions in {len(texts)} groups only {distinct} are distinct within their group."
        return [Evidence(rollouts.SOURCE, 0, distinct / total, 0.7, note)]

    def forbids(self, run: View) -> list[Evidence]:
        early = run.first_of(*ENTROPY).finite.head(5)
        if len(early) and early.median > 0.15:
            return [
                run.fact(early, early.median, self.limit, "The entropy starts at {value} nats: sampling is diverse.")
            ]
        return []
