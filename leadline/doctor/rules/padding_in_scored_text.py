import re

from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class PaddingInScoredText(Rule):
    """The text that the reward scores holds padding or end tokens.

    ## Symptom
    Rewards are systematically lower than a spot check would give; dumped completions show runs of `<pad>` or
    `<|endoftext|>`.

    ## Cause
    Padding is not stripped before the text is decoded for the reward, or only part of it is.

    ## Fix
    Cut each completion at its first end token, by position and not by id, before decoding.

    ## References
    Common Pitfalls in RL Post-Training, "padding token contamination". More than a tenth of the dumped completions: leadline's choice. Two padding or
    end tokens at the very end: a policy may sample one anywhere. Only a dump of completions shows it: no metric does.
    """

    id = "LL217"
    name = "padding-in-scored-text"
    severity = "error"
    explains = ("reward-parse-mismatch",)
    confirm = "Print a completion as the reward receives it."
    sick = (RunLog([{"step": 1}], samples=[{"step": 1, "prompt": "p", "completion": "42<pad><pad><pad>"}] * 16),)
    healthy = (
        RunLog([{"step": 1}], samples=[{"step": 1, "prompt": "p", "completion": "42<|im_end|>"}] * 16),
        RunLog([{"step": 1}], samples=[{"step": 1, "prompt": "p", "completion": "4<|pad|>2 and so on"}] * 16),
    )
    token = r"(<pad>|\[PAD\]|<\|pad\|>|<\|finetune_right_pad_id\|>|<\|endoftext\|>|</s>)"
    padding = re.compile(rf"({token}\s*){{2}}$")
    """At the end, and more than one: a single end token is a terminator, and a model may write any token in the middle."""

    def examine(self, run: View) -> list[Evidence]:
        note = "{percent} of {count} dumped completions hold padding."
        return rollouts.share(run, lambda text: self.padding.search(text) is not None, 0.1, note)
