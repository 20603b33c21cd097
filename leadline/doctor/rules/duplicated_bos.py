import re

from leadline.doctor import measurements as probe
from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class DuplicatedBos(Rule):
    """The engine's prompts begin with two BOS tokens.

    ## Symptom
    The reward is clearly lower with the engine than with the trainer's own generation; ratio and KL are off on early
    tokens; prompt ids start with the same token twice.

    ## Cause
    The chat template writes BOS into the text, and the engine's tokenizer adds another.

    ## Fix
    Send token ids to the engine, not text, or tokenize with `add_special_tokens=False`.

    ## References
    huggingface/trl issue 3853 (Llama-3.2 with vLLM). Ids decide; the model's family is only a hint.
    """

    id = "LL212"
    name = "duplicated-bos"
    severity = "error"
    explains = ("rollout-logprob-mismatch",)
    confirm = "Print the first token ids that the engine receives: is the same id there twice?"
    sick = (
        RunLog(
            [{"step": 1}], samples=[{"step": 1, "prompt": f"p{i}", "prompt_token_ids": [1, 1, i]} for i in range(8)]
        ),
        RunLog([{"step": 1}], {"raw": {"prompt_token_ids_head": [128000, 128000, 9125]}}),
        RunLog([{"step": 1, "bos_count": 2}]),
    )
    healthy = (
        RunLog(
            [{"step": 1}], samples=[{"step": 1, "prompt": f"p{i}", "prompt_token_ids": [1, 5, i]} for i in range(8)]
        ),
        RunLog([{"step": 1}], {"raw": {"prompt_token_ids_head": [128000, 9125]}}),
        RunLog([{"step": 1, "bos_count": 1}]),
    )

    def examine(self, run: View) -> list[Evidence]:
        return probe.above(run, r"\bbos\b", 1, "{name} is {value}: BOS is there more than once.")

    def lint(self, run: View) -> list[Evidence]:
        found = []
        for name, value in run.raw(r"prompt.*ids|token_ids_head|input_ids"):
            ids = list(value) if isinstance(value, list | tuple) else re.findall(r"\d+", str(value))
            if len(ids) > 1 and ids[0] == ids[1]:
                found.append(Evidence(name, 0, 2.0, 1.0, f"Prompts start with the token {ids[0]} twice.", "proof"))
        said = run.says(r"double.?bos|two bos|bos.*(twice|duplicat|doubled)|add_bos.*= (true|1)")
        if said:
            found.append(Evidence("bos", 0, 2.0, 1.0, f"BOS may be added twice ({said}).", "weak"))
        return found

    def measure(self, run: View) -> list[Evidence]:
        """Prompts of different texts begin alike with a template, and with one token twice if BOS is doubled."""
        heads = [s["prompt_token_ids"][:2] for s in run.run.samples if len(s.get("prompt_token_ids", ())) > 1]
        if len(heads) < rollouts.LEAST or any(head != heads[0] for head in heads) or heads[0][0] != heads[0][1]:
            return []
        note = f"All {len(heads)} dumped prompts begin with the token {heads[0][0]} twice."
        return [Evidence(rollouts.SOURCE, 0, 2.0, 1.0, note)]
