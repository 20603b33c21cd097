from collections.abc import Sequence

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    token_truncation,
)
from leadline.doctor.signals import (
    WEIGHT,
)
from leadline.doctor.view import View


class ImportanceCorrectionErasesSignal(Rule):
    """The importance correction takes most of the learning signal.

    ## Symptom
    Rewards vary, advantages are nonzero, and loss and gradient are zero or tiny. The mean importance weight as applied is
    close to 0, or the ledger's largest stage is `importance_masked` or `importance_shrunk`.

    ## Cause
    Engine and trainer disagree about the probability of the sampled tokens, and the correction does what it is set to
    do. At the sequence level the ratios of all tokens multiply: 0.3 nats a token over 150 tokens is a weight of 1e-20,
    so a mask drops every completion and a truncation shrinks each to nothing.

    ## Fix
    Correct per token and truncate instead of masking ({token}): the update is then biased but bounded, and it exists.
    Then remove the cause of the disagreement: compare the engine's dtype with `model.dtype`, make it report processed
    logprobs (after temperature, top_p and penalties), and compare the two implementations of this architecture.

    ## References
    Liu, Li et al. 2025, "When speed kills stability": bias of token weights against variance of sequence weights.
    huggingface/trl issues 4159, 5814 and 7120. Half the signal, or a mean weight below 0.1, over three steps: leadline's choice.
    """

    id = "LL302"
    name = "importance-correction-erases-signal"
    severity = "error"
    needs = (
        (
            "ledger/importance_masked_share",
            "ledger/importance_shrunk_share",
            *WEIGHT,
            "importance/masked_fraction",
            "importance/kept_fraction",
            "importance/sequence_masked_fraction",
        ),
    )
    explains = ("dead-update", "no-update-grad-and-kl-exactly-zero", "gradient-vanishes")
    sick = (
        RunLog.from_columns(
            {"ledger/importance_masked_share": [1.0, 1.0, 1.0], "ledger/importance_shrunk_share": [0.0, 0.0, 0.0]}
        ),
        RunLog.from_columns(
            {"ledger/importance_masked_share": [0.0, 0.0, 0.0], "ledger/importance_shrunk_share": [0.99, 1.0, 1.0]}
        ),
        RunLog.from_columns({"importance/weight_mean": [3.97e-10, 4.87e-9, 2e-10], "reward/std": [0.6, 0.5, 0.6]}),
    )
    healthy = (
        RunLog.from_columns(
            {"ledger/importance_masked_share": [0.1, 0.02, 1.0], "ledger/importance_shrunk_share": [0.01, 0.0, 0.0]}
        ),
        RunLog.from_columns({"importance/weight_mean": [0.98, 1.01, 0.95]}),
    )
    limit = 0.5

    def examine(self, run: View) -> list[Evidence]:
        found = []
        for stage, deed in (("masked", "masked (weight set to 0)"), ("shrunk", "shrunk away")):
            note = f"{{percent}} of the signal was {deed} by the importance weights {{when}}."
            found += run.lasting(
                f"ledger/importance_{stage}_share", lambda v: v > self.limit, self.limit, note, strength="proof"
            )
        if found or run.has("ledger/importance_masked_share"):
            return sorted(found, key=lambda item: item.step)
        if run.setting("objective.importance_action") == "off":
            return []
        note = "The mean importance weight was {value} {when}: it multiplies the policy term of the loss."
        weight = run.first_of("importance/weight_mean", "importance/sequence_ratio_mean", "importance/ratio_mean")
        found += run.lasting(weight, lambda v: v < 0.1, 0.1, note, strength="proof")
        for name in ("importance/masked_fraction", "importance/sequence_masked_fraction"):
            found += run.lasting(name, lambda v: v > 0.7, 0.7, "{percent} was masked by the importance weights {when}.")
        note = "Only {percent} of the tokens passed the filters of the correction {when}."
        found += run.lasting("importance/kept_fraction", lambda v: v < 0.3, 0.3, note)
        return sorted(found, key=lambda item: item.step)

    def forbids(self, run: View) -> list[Evidence]:
        weight = run["importance/weight_mean"].finite
        shares = [run[f"ledger/importance_{stage}_share"].finite for stage in ("masked", "shrunk")]
        if all(len(share) and share.high < 0.3 for share in shares):
            return [
                run.fact(
                    shares[0], shares[0].high, self.limit, "The ledger lost at most {percent} of the signal there."
                )
            ]
        if len(weight) and weight.low > 0.7 and not self.examine(run):
            return [run.fact(weight, weight.low, 1.0, "The mean importance weight is at least {value}.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        return super().fix(run, evidence).format(token=token_truncation(run))

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        return run.worded(
            "Do not set `objective.mask_truncated` or raise the learning rate: the signal is lost before either acts."
        )
