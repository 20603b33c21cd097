import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.view import View


class KlPenaltyNotApplied(Rule):
    """The KL is logged, but its coefficient does not act.

    ## Symptom
    Runs with different coefficients have the same curves; the KL grows without any pull although the coefficient is large.

    ## Cause
    The estimator computes the KL and leaves it out of loss and reward (some advantage estimators ignore it), or the
    coefficient goes to an option of another name.

    ## Fix
    Use the option that acts in the loss (`objective.beta`; slime: `--use-kl-loss --kl-loss-coef`, verl: `actor.use_kl_loss`),
    and check that the loss changes with it.

    ## References
    THUDM/slime issue 397 and pull 1247. loss - beta x KL is the policy term, about 0 on policy: where the loss stays below a tenth of beta x
    KL, the term is not in it.
    """

    id = "LL418"
    name = "kl-penalty-not-applied"
    severity = "error"
    explains = ("kl-drift-reward-collapse",)
    confirm = "Run ten steps with ten times the coefficient: the curves must differ."
    sick = (
        RunLog.from_columns(
            {"loss": [0.2, -0.1, 0.1], "loss/kl": [0.0] * 3, "kl/k3": [0.1, 0.2, 0.3]}, {"objective": {"beta": 0.1}}
        ),
        RunLog.from_columns(
            {"loss": [0.0001] * 6, "kl/k3": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]}, {"objective": {"beta": 0.1}}
        ),
        RunLog([], {"raw": {"kl_coef": 0.1, "advantage_estimator": "grpo"}}),
    )
    healthy = (
        RunLog.from_columns(
            {"loss": [0.1, 0.15, 0.2, 0.25, 0.3, 0.35], "kl/k3": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]},
            {"objective": {"beta": 0.1}},
        ),
        RunLog.from_columns({"loss": [0.0001] * 6, "kl/k3": [0.001] * 6}, {"objective": {"beta": 0.04}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        beta = run.number("objective.beta")
        if left_out := self._term_is_zero(run, beta):
            return left_out
        steps, loss, kl = paired(run["loss"], run.first_of("kl/k3", "kl/reference"))
        if not beta > 0 or len(steps) < PERSISTENT or run.has("kl/reward_term") or np.median(beta * kl) < 0.02:
            return []
        tracks = np.corrcoef(loss, kl)[0, 1] if np.ptp(loss) > 0 and np.ptp(kl) > 0 else 0.0
        if np.median(np.abs(loss)) > 0.1 * np.median(beta * kl) or tracks > 0.5:
            return []
        note = f"beta x KL is {number(float(np.median(beta * kl)))}, and the loss {{value}}: the penalty is not in it."
        return [run.fact(run["loss"], float(np.median(loss)), float(np.median(beta * kl)), note, since=int(steps[0]))]

    @staticmethod
    def _term_is_zero(run: View, beta: float) -> list[Evidence]:
        """The KL term of the loss is logged by itself, and is nothing beside beta x KL."""
        steps, term, kl = paired(run["loss/kl"], run.first_of("kl/k3", "kl/reference"))
        if not beta > 0 or len(steps) < PERSISTENT or np.median(kl) < 1e-4 or run.has("kl/reward_term"):
            return []
        if np.max(np.abs(term)) > 1e-4 * beta * np.median(kl):
            return []
        note = f"beta x KL is {number(float(np.median(beta * kl)))}, and the KL term of the loss {{value}}: it is left out."
        return [run.fact(run["loss/kl"], float(np.max(np.abs(term))), 0.0, note, "proof", int(steps[0]))]

    def lint(self, run: View) -> list[Evidence]:
        coefficient = [n for n, v in run.raw(r"(^|[._-])kl_coef$|init_kl_coef") if v not in (0, 0.0, None, "0")]
        grouped = run.says(r"(advantage_estimator|adv_estimator|estimator)\W*= .*(grpo|gspo|cispo)")
        lossless = (
            not run.says(r"use_kl_loss\W*= (true|1)|use_kl_in_reward\W*= (true|1)")
            and not run.number("objective.beta") > 0
        )
        if coefficient and grouped and lossless:
            note = f"{coefficient[0]} is set, but {grouped} does not use it unless a KL loss is switched on."
            return [
                Evidence(coefficient[0], 0, 1.0, 0.0, note, "strong" if run.framework in ("slime", "miles") else "weak")
            ]
        return []
