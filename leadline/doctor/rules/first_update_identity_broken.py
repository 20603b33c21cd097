from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import above
from leadline.doctor.setup import (
    is_async,
)
from leadline.doctor.signals import (
    CLIP,
)
from leadline.doctor.view import View


class FirstUpdateIdentityBroken(Rule):
    """The policy differs from itself before it was updated.

    ## Symptom
    At the first optimizer step of a step, where old logprobs and logprobs come from the same weights, the policy ratio
    is not 1 (`policy/first_ratio_error`), the KL is not 0 (`policy/first_kl_old`) or tokens are clipped
    (`policy/first_clip_fraction`). In a log without these: a clip fraction above 0 with one update per batch.

    ## Cause
    The two passes do not compute the same thing: dropout is on, tokens or masks are laid out differently, the
    temperature is applied in one pass only, an adapter is on in one only, or the old logprobs are of other weights.
    Every ratio and clip of the run is then wrong.

    ## Fix
    Turn off dropout in the model's config, and compute old logprobs with the same code, batch layout, temperature and
    adapter as the update. To see where they part, compare the two logprobs of one completion token by token.

    ## References
    An identity: the same weights give the same logprobs. slime's CI demands a KL below 1e-8, miles' below 1e-9 and a
    clip fraction below 1e-10. In bf16 and fp16 two passes round differently, so a ratio error up to 0.2, a KL up to 1e-3 and a
    clipped token in a thousand pass (p95 of engine noise: 0.12 nats, huggingface/trl issue 6789).
    """

    id = "LL401"
    name = "first-update-identity-broken"
    severity = "error"
    needs = (("policy/first_ratio_error", "policy/clip_fraction"),)
    sick = (
        RunLog.from_columns({"policy/first_ratio_error": [0.0, 0.02]}),
        RunLog.from_columns({"policy/first_ratio_error": [0.0], "policy/first_kl_old": [1e-6]}),
        RunLog.from_columns({"policy/first_ratio_error": [0.0], "policy/first_clip_fraction": [0.01]}),
        RunLog.from_columns({"policy/first_ratio_error": [0.8]}, config={"model": {"dtype": "bfloat16"}}),
        RunLog.from_columns(
            {"policy/clip_fraction": [0.3] * 3}, config={"optimizer": {"epochs_per_batch": 1, "minibatches": 1}}
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"policy/first_ratio_error": [2e-6], "policy/first_kl_old": [1e-13], "policy/first_clip_fraction": [0.0]}
        ),
        RunLog.from_columns(
            {"policy/first_ratio_error": [0.06], "policy/first_kl_old": [2e-4]}, config={"model": {"dtype": "bfloat16"}}
        ),
        RunLog.from_columns(
            {"policy/clip_fraction": [0.3] * 3}, config={"optimizer": {"epochs_per_batch": 4, "minibatches": 1}}
        ),
    )
    limits = (("policy/first_ratio_error", 1e-4), ("policy/first_kl_old", 1e-8), ("policy/first_clip_fraction", 0.0))
    half_limits = (
        ("policy/first_ratio_error", 0.2),
        ("policy/first_kl_old", 1e-3),
        ("policy/first_clip_fraction", 1e-3),
    )

    def examine(self, run: View) -> list[Evidence]:
        half = run.setting("model.dtype") in ("bfloat16", "float16")
        found = []
        for name, limit in self.half_limits if half else self.limits:
            note = f"{name} was {{value}} {{when}}; before the first update it is 0 up to {limit:g}."
            found += run.events(name, above(limit), limit, note)
        epochs, parts = run.number("optimizer.epochs_per_batch"), run.number("optimizer.minibatches")
        clip = run.first_of(*CLIP)
        if epochs == 1 and parts == 1 and not run.has("policy/first_clip_fraction") and not is_async(run):
            note = "{percent} of the tokens were clipped {when}, with one update per batch, where nothing can be."
            found += run.lasting(clip, lambda v: v > 0.01, 0.01, note)
        return sorted(found, key=lambda item: item.step)
