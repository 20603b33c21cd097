from leadline.doctor.rule import Evidence, Rule, when
from leadline.doctor.run_log import RunLog, above


class FirstUpdateIdentityBroken(Rule):
    """The policy differs from itself before it was updated.

    ## Symptom
    At the first optimizer step of a step, where old logprobs and logprobs come from the same weights, the policy ratio
    is not 1 (`policy/first_ratio_error`), the KL is not 0 (`policy/first_kl_old`) or tokens are clipped
    (`policy/first_clip_fraction`).

    ## Cause
    The two passes do not compute the same thing: dropout is on, tokens or masks are laid out differently, the
    temperature is applied in one pass only, an adapter is on in one only, or the old logprobs are of other weights.
    Every ratio and clip of the run is then wrong.

    ## Fix
    Turn off dropout in the model's config, and compute old logprobs with the same code, batch layout, temperature and
    adapter as the update. To see where they part, compare the two logprobs of one completion token by token in
    `blackbox/`.

    ## References
    An identity: the same weights give the same logprobs. slime's CI demands a KL below 1e-8, miles' below 1e-9 and a
    clip fraction below 1e-10. In bf16 and fp16 two passes round differently, so a ratio error up to 0.2, a KL up to 1e-3 and a
    clipped token in a thousand pass (p95 of engine noise: 0.12 nats, huggingface/trl issue 6789).
    """

    id = "LL401"
    name = "first-update-identity-broken"
    severity = "error"
    needs = ("policy/first_ratio_error",)
    sick = (
        RunLog.from_columns({"policy/first_ratio_error": [0.0, 0.02]}),
        RunLog.from_columns({"policy/first_ratio_error": [0.0], "policy/first_kl_old": [1e-6]}),
        RunLog.from_columns({"policy/first_ratio_error": [0.0], "policy/first_clip_fraction": [0.01]}),
        RunLog.from_columns({"policy/first_ratio_error": [0.8]}, config={"model": {"dtype": "bfloat16"}}),
    )
    healthy = (
        RunLog.from_columns(
            {"policy/first_ratio_error": [2e-6], "policy/first_kl_old": [1e-13], "policy/first_clip_fraction": [0.0]}
        ),
        RunLog.from_columns(
            {"policy/first_ratio_error": [0.06], "policy/first_kl_old": [2e-4]}, config={"model": {"dtype": "bfloat16"}}
        ),
    )
    limits = (("policy/first_ratio_error", 1e-4), ("policy/first_kl_old", 1e-8), ("policy/first_clip_fraction", 0.0))
    half_limits = (
        ("policy/first_ratio_error", 0.2),
        ("policy/first_kl_old", 1e-3),
        ("policy/first_clip_fraction", 1e-3),
    )

    def examine(self, run: RunLog) -> list[Evidence]:
        half = run.setting("model.dtype") in ("bfloat16", "float16")
        found = [
            Evidence(
                name,
                streak.last,
                streak.value,
                limit,
                f"{name} was {streak.value:.3g} {when(streak)}; before the first update it is 0 up to {limit:g}.",
            )
            for name, limit in (self.half_limits if half else self.limits)
            for streak in run.streaks(name, above(limit), 1)
        ]
        return sorted(found, key=lambda item: item.step)
