"""Preflight of the rewards: canaries through the run's own scorer, with the columns of its first prompt.

A reward stops the run only where nothing could be learned from it: it raises on every text, returns no number, or scores
wrong answers above right ones. What else it does is said. It is called about fifty times; not called are reward models
and asynchronous functions, which may cost money or belong to another event loop.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from leadline.errors import RewardError
from leadline.probes.code.canaries import FORMS, WRONG, Bench, bears, found_form, gold, hacks
from leadline.probes.code.reward_call import ONE, Task, TooSlow
from leadline.probes.preflight.parts import Parts, Undecided
from leadline.rewards.component import Component
from leadline.rewards.scorer import Scorer
from leadline.types import Completion, FinishReason, Prompt, Rollout

ODD_S = 10.0
"""An odd text is not waited for longer, whatever the reward's own limit."""
CHARACTERS, LONGEST_FORM = 16, 400
"""A token spells hardly more characters; a right answer in some form is not longer."""
ORDINARY = ("The answer is 5.", "5", "I do not know.")
GOLD = frozenset(ONE["gold"].split())


class RunRewards:
    """Components of a run as a function of a text: their weighted sum, with the columns of a prompt."""

    batched = False

    def __init__(self, parts: Parts, components: Sequence[Component]) -> None:
        self._scorer = Scorer(components)
        self._tokenizer = parts.tokenizer
        self._most = parts.config.sampling.max_tokens
        self.prompt: Prompt = parts.first_prompts[0]

    def rollouts(self, texts: Sequence[str]) -> list[Rollout]:
        """As in a run, but for the tokens, which are the text's own. Raises RewardError.

        A text is cut where no completion of the run could be longer. No tokens spell a lone surrogate.
        """
        longest = max(LONGEST_FORM, CHARACTERS * self._most)
        decodable = [text[:longest].encode("utf-8", "replace").decode() for text in texts]
        completions = [self._completion(text) for text in decodable]
        return asyncio.run(self._scorer.score(self.prompt, completions, decodable))

    # The time limit is the components' own.
    def scores(self, task: Task, texts: Sequence[str], timeout_s: float = 0.0) -> list[float | None]:
        """What the canaries ask for: a number a text, None for no reward. Raises what the rewards raised."""
        found = self.rollouts(texts)
        for rollout in found:
            if rollout.error is not None and ": timeout, " in rollout.error:
                raise TooSlow(rollout.error)
            if rollout.error is not None and ": TimeoutError: " in rollout.error:
                raise TimeoutError(rollout.error)
            if rollout.error is not None:
                raise RuntimeError(rollout.error)
        return [None if math.isnan(rollout.reward) else rollout.reward for rollout in found]

    def _completion(self, text: str) -> Completion:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][: self._most]
        return Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), FinishReason.EOS)


def rewards(parts: Parts) -> str:
    """The rewards answer to texts as a model may write them, and prefer the right answer. Raises RewardError."""
    called, left_out = _called(parts)
    aside = f"; not called: {', '.join(left_out)}" if left_out else ""
    if not called:
        raise Undecided(f"no reward is called before the run{aside}")
    whole = RunRewards(parts, called)
    _check_answers(whole)
    remarks = [*_odd(whole, RunRewards(parts, [replace(c, timeout_s=min(c.timeout_s, ODD_S)) for c in called]))]
    judged, answer = [c for c in called if c.weight and c.accepts & {*GOLD, "entry"}], _gold(whole.prompt)
    if judged and answer is not None:
        said, more = _against_gold(RunRewards(parts, judged), answer)
        remarks += more
    else:
        said = "no right answer is known to compare with"
    noted = f"; mind: {'; '.join(remarks)}" if remarks else ""
    return f"{', '.join(c.label for c in called)}: {said}{noted}{aside}"


def _called(parts: Parts) -> tuple[list[Component], list[str]]:
    pairs = list(zip(parts.config.rewards, parts.scorer.components, strict=True))
    quiet = [c for reward, c in pairs if c.is_async or reward.name.startswith("model:")]
    return [c for _, c in pairs if c not in quiet], [c.label for c in quiet]


def _check_answers(whole: RunRewards) -> None:
    errors = [rollout.error for rollout in whole.rollouts(ORDINARY)]
    if all(error is not None for error in errors):
        raise RewardError(
            f"rewards has {errors[0]!r} on {ORDINARY[0]!r}, but it was to score the text, and so for {len(ORDINARY)} of "
            f"{len(ORDINARY)} ordinary ones. Every rollout would be failed. Mend the function; "
            "`leadline probe code --as reward` says more."
        )


def _odd(whole: RunRewards, limited: RunRewards) -> Iterator[str]:
    """What texts that a model will write one day do to the rewards."""
    first, again = ([r.reward for r in whole.rollouts(ORDINARY)] for _ in range(2))
    if repr(first) != repr(again):
        yield "the same text gets different rewards"
    bench = Bench(limited, Task("", "", {}), "{}", 1.0, 0.0, 0.0)
    found = list(bears(bench))
    yield from (f"{one.title[0].lower()}{one.title[1:]} ({one.evidence[:80]})" for one in found[:1])
    if len(found) > 1:
        yield f"so on {len(found) - 1} more odd texts"


def _against_gold(judged: RunRewards, answer: str) -> tuple[str, list[str]]:
    """How the right answer fares against wrong ones, in the form that it scores best in."""
    wrongs = [text for text in (*WRONG, "none at all") if answer not in text and text not in answer][:2]
    task = Task(judged.prompt.text, answer, judged.prompt.columns)
    try:
        benches = [found_form(judged, task, wrong) for wrong in wrongs]
    except (RuntimeError, TimeoutError, TooSlow) as error:
        return f"no comparison with the right answer {answer!r}", [f"on an ordinary answer: {str(error)[:80]}"]
    if all(bench.right < bench.wrong for bench in benches):
        raise RewardError(
            f"rewards gives the right answer {answer!r} {benches[0].right:g}, but the wrong one {wrongs[0]!r} "
            f"{benches[0].wrong:g}, in each of {len(FORMS)} forms. The policy would learn to be wrong. Check the sign of "
            "rewards.weight, and the order of the comparison."
        )
    bench = benches[0]
    said = f"in the form {bench.form!r} right scores {bench.right:g}, wrong {bench.wrong:g}, empty {bench.empty:g}"
    return said, [one.title[0].lower() + one.title[1:] for check in (gold, hacks) for one in check(bench)]


def _gold(prompt: Prompt) -> str | None:
    """The answer that the prompt's row holds, if it is short enough to be one."""
    entry = prompt.columns.get("entry")
    columns = {**(entry if isinstance(entry, Mapping) else {}), **prompt.columns}
    found = next(
        (columns[name] for name in ONE["gold"].split() if isinstance(columns.get(name), str | int | float)), None
    )
    return None if found is None or not 0 < len(str(found)) <= 200 else str(found)
