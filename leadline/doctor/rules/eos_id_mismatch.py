import re

import numpy as np

from leadline.doctor.rule import Evidence, Rule, percent
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    cap,
)
from leadline.doctor.view import View


class EosIdMismatch(Rule):
    """The trainer does not know the token with which completions end.

    ## Symptom
    The truncated share is 0.5 to 1 although completions are shorter than the limit and texts end cleanly; the mean
    length of terminated completions is 0.

    ## Cause
    The chat template ends turns with another token than the tokenizer's single EOS id (the generation config lists it),
    or completions end with a stop string. Metrics, EOS mask and truncation mask are then all wrong.

    ## Fix
    Give the trainer all ids of the generation config's `eos_token_id`, or set the tokenizer's EOS to the token that ends
    a turn (`sampling.stop_token_ids`). With stop strings, do not trust this metric.

    ## References
    huggingface/trl pull 7039 (Phi-3.5: 0.97 "truncated"). That the mean or longest completion is below 90 % of the limit while more
    than 30 % count as truncated cannot be true truncation.
    """

    id = "LL205"
    name = "eos-id-mismatch"
    severity = "error"
    explains = ("truncation-rate-high-unresolved", "truncation-cap-too-small", "clipped-ratio-metric-wrong")
    confirm = "Compare the last token id of a completion with every id in generation_config.eos_token_id."
    sick = (
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.97] * 3, "rollout/length_max": [900.0] * 3},
            {"sampling": {"max_tokens": 2048}},
        ),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.97]},
            {"raw": {"generation_config.eos_token_id": [32007, 32000], "tokenizer.eos_token_id": 32000}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.97] * 3, "rollout/length_max": [2048.0] * 3},
            {"sampling": {"max_tokens": 2048}},
        ),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.02]},
            {"raw": {"generation_config.eos_token_id": [32007, 32000], "tokenizer.eos_token_id": 32000}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        cut, limit = run["rollout/truncated_fraction"].finite, cap(run)
        found = []
        if len(cut) and cut.median > 0.3 and np.isfinite(limit):
            for name in ("rollout/length_max", "rollout/length_mean"):
                steps, share, length = paired(cut, run[name])
                # a mean far below the limit with almost everything cut off is as impossible as a short longest one
                short = (share > 0.3) & (length < (0.9 if name.endswith("max") else 0.8 * share) * limit)
                if len(steps) and np.mean(short) > 0.5:
                    note = f"{name} is {{value}}, below the limit of {{limit}}, though {percent(cut.median)} count as truncated."
                    found.append(
                        run.fact(
                            run[name],
                            float(np.median(length)),
                            limit,
                            note,
                            "strong" if not self._stops(run) else "weak",
                        )
                    )
        if len(cut) and cut.median > 0.3 and self._ids(run):
            found.append(run.fact(cut, cut.median, 0.3, f"{{percent}} count as truncated, and {self._ids(run)}."))
        return found

    def lint(self, run: View) -> list[Evidence]:
        ids = self._ids(run)
        return (
            [Evidence("eos_token_id", 0, 1.0, 0.0, f"Check the end tokens: {ids}.", "weak")]
            if ids and not run.has("rollout/truncated_fraction")
            else []
        )

    def forbids(self, run: View) -> list[Evidence]:
        ended, cut = run["rollout/terminated_length_mean"].finite, run["rollout/truncated_fraction"].finite
        if len(cut) and cut.high < 0.3:
            return [run.fact(cut, cut.high, 0.3, "At most {percent} count as truncated: the end token is known.")]
        if len(ended) and len(cut) and ended.median > 0 and cut.median < 0.3:
            return [
                run.fact(ended, ended.median, 0.0, "Terminated completions are {value} tokens long: the end is seen.")
            ]
        return []

    @staticmethod
    def _stops(run: View) -> bool:
        return bool(run.setting("sampling.stop")) or run.says(r"\bstop(_strings?|_token_ids)?\W*= \S") is not None

    @staticmethod
    def _ids(run: View) -> str:
        listed = {
            name: value
            for name, value in run.raw(r"eos_token_id|eos_id|terminator|stop_token|eot")
            if value is not None
        }
        known = {token for value in listed.values() for token in re.findall(r"\d+", str(value))}
        return f"several end tokens are configured: {', '.join(sorted(known))}" if len(known) > 1 else ""
