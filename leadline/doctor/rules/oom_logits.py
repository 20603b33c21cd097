import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.view import View


class OomLogits(Rule):
    """The logits of the whole batch fill the memory, whatever the size of the model.

    ## Symptom
    Out of memory in the logprob or loss step; the size is batch x length x vocabulary x bytes. A small model needs nearly as
    much as a large one.

    ## Cause
    Full logits of all completion tokens are built (and copied by softmax), 4 bytes x vocabulary for each token.

    ## Fix
    Compute logprobs in chunks or with a fused loss, lower the micro-batch (`optimizer.tokens_per_micro`), or cap the tokens per
    GPU. Another ZeRO stage or a smaller model does not help.

    ## References
    huggingface/trl issue 3678 (310 MB of logits for 2 x 256 tokens), THUDM/slime issue 1951 (58 GiB). A quarter of the peak, or 2 GiB by the
    formula: leadline's choice.
    """

    id = "LL601"
    name = "oom-logits"
    severity = "error"
    sick = (
        RunLog([{"step": 1, "logits_MB": 310, "peak_MB": 902}]),
        RunLog([{"step": 1, "tried_to_allocate_GiB": 58.15}]),
    )
    healthy = (
        RunLog([{"step": 1, "logits_MB": 31, "peak_MB": 9020}]),
        RunLog.from_columns({"memory/peak_bytes": [1e9] * 3}),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        for name, logits in run.measured(r"logits.*(mb|gb|mib|gib|bytes)"):
            for other, peak in run.measured(r"peak|vram|memory|\bmem\b"):
                steps, size, most = paired(logits, peak)
                if len(steps) and np.any(size > 0.25 * most):
                    note = f"{name} is {{value}} of a {other} of {{limit}}."
                    found.append(run.fact(logits, float(size.max()), float(most.max()), note))
        found += probe.above(
            run, r"(tried|attempt|request).*(alloc)|alloc.*(gib|gb)|\boom\b", 1, "{name} is {value}.", "strong"
        )
        batch, length, vocabulary = (
            self._first(run, w)
            for w in (r"^batch|micro batch|batch size", r"logits to keep|seq.*len|length|tokens", r"vocab")
        )
        needed = 4 * batch * length * vocabulary / 2**30
        if needed > 2:
            name = next(n for n, _ in run.measured("vocab"))
            found.append(
                Evidence(name, run[name].step, vocabulary, 0.0, f"Logits need {number(needed)} GiB at 4 bytes each.")
            )
        return found

    @staticmethod
    def _first(run: View, pattern: str) -> float:
        return next((s.finite.high for _, s in run.measured(pattern) if len(s.finite)), np.nan)
