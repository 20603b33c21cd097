"""Completions whose reward is known beforehand, and what it means when a function disagrees."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from leadline.errors import RewardError
from leadline.probes.code.findings import Finding, Level
from leadline.probes.code.reward_call import RewardCall, Scores, Task, TooSlow, answer_timed

TASKS = (
    Task("What is 2 + 3?", "5", {}),
    Task("What is 12 times 12?", "144", {}),
)
WRONG = ("8", "97", "-31")
"""Answers of no task above; one is chosen that neither contains the right answer nor is contained in it."""

FORMS = (
    "{}",
    "The answer is {}.",
    "<answer>{}</answer>",
    "<think>I compute.</think>\n<answer>{}</answer>",
    "<think>\nI compute.\n</think>\n<answer>\n{}\n</answer>",
    "<think>\nI compute.\n</think>\n\n{}",
    "\\boxed{{{}}}",
    "$\\boxed{{{}}}$",
    "So we get it.\n#### {}",
    "Answer: {}",
    "Final answer: {}",
    "**Answer:** {}",
    '{{"answer": "{}"}}',
    '```json\n{{"answer": {}}}\n```',
)
"""How an answer may have to be written. The one that scores best is taken for the function's format."""

LONG = 100_000
SLOW_S = 1.0

Check = Callable[["Bench"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A reward function with the form of answer that it likes."""

    call: Scores
    task: Task
    form: str
    right: float
    """Reward of the right answer in this form."""
    wrong: float
    """Of a wrong one in the same form."""
    empty: float

    def of(self, text: str) -> float | str:
        """The reward of a text, 0 for none; or what was raised."""
        try:
            (value,) = self.call.scores(self.task, [text])
            return 0.0 if value is None else value
        except Exception as error:  # the user's code runs here
            return f"{type(error).__name__}: {error}"

    @property
    def answer(self) -> str:
        """The right answer, in the form."""
        return self.form.format(self.task.gold)

    def scores_like_right(self, text: str) -> bool:
        """At least as much as nine tenths of the way from wrong to right."""
        value = self.of(text)
        return not isinstance(value, str) and value >= self.wrong + 0.9 * (self.right - self.wrong)


def finding(level: Level, name: str, title: str, consequence: str, fix: str, evidence: str = "") -> Finding:
    """A finding, for the checks below."""
    return Finding(level, name, title, consequence, fix, evidence)


def found_form(call: Scores, task: Task, wrong: str) -> Bench:
    """The form in which the right answer scores best, relative to a wrong one. Raises what the function raises."""
    texts = [form.format(answer) for answer in (task.gold, wrong) for form in FORMS]
    *scores, empty = (0.0 if value is None else value for value in call.scores(task, [*texts, ""]))
    rights, wrongs = scores[: len(FORMS)], scores[len(FORMS) :]
    gaps = [right - bad for right, bad in zip(rights, wrongs, strict=True)]
    best = max(range(len(FORMS)), key=lambda i: (gaps[i] > 0, abs(gaps[i]), rights[i]))
    return Bench(call, task, FORMS[best], rights[best], wrongs[best], empty)


def gold(bench: Bench) -> Iterator[Finding]:
    """The right answer must score above a wrong and an empty one."""
    gap = bench.right - bench.wrong
    shown = f"right {bench.right:g}, wrong {bench.wrong:g}, empty {bench.empty:g}"
    if gap < 0:
        yield finding(
            "error",
            "sign_flipped",
            "A wrong answer scores more than the right one",
            "The policy learns to be wrong.",
            "Check the sign, and the order of the comparison.",
            shown,
        )
    if gap == 0 and bench.right <= bench.empty:
        yield finding(
            "error",
            "gold_not_rewarded",
            f"The right answer scores no more than a wrong one, in any of {len(FORMS)} forms",
            "Rewards do not depend on being right (or its format is none of the usual ones): no group has a signal.",
            "Score a completion that you know to be right; give its format with --samples, or --arg for its columns.",
            shown,
        )
    elif gap == 0 and bench.right > bench.empty:
        yield finding(
            "error",
            "wrong_answer_rewarded",
            "A wrong answer scores as much as the right one",
            "The format alone is rewarded; being right is not learned.",
            "Compare with the gold answer; fine for a reward that is meant to judge the format.",
            shown,
        )
    if bench.empty > bench.right > bench.wrong:
        yield finding(
            "error",
            "empty_rewarded",
            "An empty completion scores more than the right answer",
            "The policy learns to say nothing. Often length or failure is punished more than being right is rewarded.",
            "Give nothing parsed the reward of a wrong answer.",
            shown,
        )


def hacks(bench: Bench) -> Iterator[Finding]:
    """Texts that are no answer and must not score like one."""
    if bench.right <= bench.wrong:
        return
    numbers = " ".join(bench.form.format(i) for i in range(200))
    cases: tuple[tuple[Level, str, str, str, str], ...] = (
        (
            "error",
            "every_answer_rewarded",
            "Listing every possible answer scores like the right one",
            " ".join(str(i) for i in range(200)) + "\n" + numbers,
            "Compare one extracted answer (the last), not whether the gold answer occurs in the text.",
        ),
        (
            "note",
            "unclosed_reasoning_rewarded",
            "The answer inside reasoning that never closes scores like an answer",
            f"<think>perhaps {bench.answer}",
            "Score what follows the reasoning (leadline's decoding does).",
        ),
        (
            "error",
            "echo_rewarded",
            "The prompt and the empty form scores like the right answer",
            f"{bench.task.prompt} {bench.form.format('')}",
            "An empty answer is wrong.",
        ),
        (
            "note",
            "wrong_then_right_rewarded",
            "A wrong answer followed by the right one scores like the right one",
            f"{bench.form.format('99999')}\n{bench.answer}",
            "Fine if the last answer counts; refuse several answers if not.",
        ),
        (
            "note",
            "truncated_rewarded",
            "An answer whose markup is cut off scores like a whole one",
            bench.form.partition("{}")[0].format() + bench.task.gold if bench.form.partition("{}")[2] else "",
            "Fine if cut answers may count; require the closing markup if not.",
        ),
    )
    for level, name, title, text, fix in cases:
        if bench.scores_like_right(text):
            yield finding(level, name, title, "The policy will find it: it is easier than the task.", fix)


def robust(bench: Bench) -> Iterator[Finding]:
    """The right answer with what an engine may leave around it."""
    if bench.right <= bench.wrong:
        return
    for name, title, text, fix in (
        ("eos_sensitive", "A trailing EOS token", f"{bench.answer}<|im_end|>", "Strip terminators before scoring."),
        ("space_sensitive", "A newline around the answer", f"\n{bench.answer}\n", "Strip the text before scoring."),
    ):
        if not bench.scores_like_right(text):
            yield finding(
                "note", name, f"{title} costs the reward", "Right answers are punished for how they end.", fix
            )
    if "<" in bench.form and not bench.scores_like_right(bench.task.gold):
        yield finding(
            "note",
            "needs_markup",
            "The answer scores only inside its markup",
            "If the tags are special tokens, decoding with skip_special_tokens=True makes every reward 0.",
            "Keep special tokens when decoding.",
            bench.form.replace("\n", "\\n"),
        )


def bears(bench: Bench) -> Iterator[Finding]:
    """Texts that must not make it raise, or take long."""
    odd = {
        "an empty completion": "",
        "an answer cut in the middle": bench.answer[: max(1, len(bench.answer) // 2)],
        "half-open markup": "<answer>",
        "an unclosed brace": "\\boxed{",
        "a NUL, a lone surrogate and an emoji": "\x00 \ud800 🙂",
        "a huge power": bench.form.format("9**9**9"),
        f"{LONG:,} characters": "a(" * (LONG // 2),
        f"{LONG:,} digits": "9" * LONG,
        "not a number": bench.form.format("nan"),
    }
    for words, text in odd.items():
        try:
            (value,), seconds = answer_timed(bench.call, bench.task, text)
        except TooSlow as error:
            yield finding(
                "error",
                "hangs",
                f"It does not return on {words}",
                "A model will write it one day; without a timeout the run stands still.",
                "Bound the work (length, digits, depth), or run it in a process with a timeout.",
                str(error),
            )
            return  # what hangs keeps a core
        except TimeoutError as error:
            yield finding(
                "note",
                "times_out",
                f"It gives up on {words}",
                "The rollout counts as failed, not as wrong.",
                "Return the reward of a wrong answer, if that is what it is.",
                str(error)[:160],
            )
            continue
        except Exception as error:
            yield _raised(words, error)
            continue
        if value is not None and value != value:
            yield finding(
                "error",
                "not_finite",
                f"It returns NaN on {words}",
                "One NaN takes its group with it.",
                "Return a number, or None for no reward.",
            )
        elif seconds > SLOW_S:
            yield finding(
                "note",
                "slow",
                f"It takes {seconds:.1f} s on {words}",
                "A step waits for its slowest reward.",
                "Bound the length that is looked at; mind regular expressions that backtrack.",
            )


def _raised(words: str, error: Exception) -> Finding:
    kind = "returned_wrong_type" if isinstance(error, RewardError) else "raises"
    return finding(
        "error",
        kind,
        f"It raises on {words}",
        "A trainer stops, or counts the rollout as failed: it teaches nothing.",
        "Catch what parsing raises, and return the reward of a wrong answer.",
        f"{type(error).__name__}: {str(error)[:160]}",
    )


def steady(bench: Bench) -> Iterator[Finding]:
    """The same text has the same reward: again, among others, and in threads."""
    texts = [bench.answer, "", bench.form.format("7"), "I do not know."]
    try:
        alone = [bench.of(text) for text in texts]
        if any(repr([bench.of(text) for text in texts]) != repr(alone) for _ in range(4)):
            yield finding(
                "error",
                "not_deterministic",
                "The same completion gets different rewards",
                "Advantages are noise.",
                "Seed what is random, or average over several draws.",
            )
            return
        yield from _among_others(bench, texts, alone)
        yield from _threads(bench, texts, alone)
    except TooSlow:
        return


def _among_others(bench: Bench, texts: Sequence[str], alone: Sequence[Any]) -> Iterator[Finding]:
    if not bench.call.batched or any(isinstance(value, str) for value in alone):
        return
    together = [0.0 if value is None else value for value in bench.call.scores(bench.task, texts[::-1])][::-1]
    if repr(together) != repr([*alone]):
        yield finding(
            "error",
            "depends_on_the_batch",
            "A completion's reward depends on the others of the batch",
            "Rewards of one group are compared with each other: they must mean the same.",
            "Score each completion for itself; normalisation is the trainer's work. Check the order of the results.",
        )


def _threads(bench: Bench, texts: Sequence[str], alone: Sequence[Any]) -> Iterator[Finding]:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(bench.of, [*texts] * 25))
    broken = next((r for r, a in zip(results, [*alone] * 25, strict=True) if repr(r) != repr(a)), None)
    if broken is not None:
        yield finding(
            "error",
            "not_thread_safe",
            "Called from several threads at once, it gives other rewards",
            "Trainers call rewards from threads.",
            "Keep no state outside the call.",
            str(broken)[:160],
        )


def keeps_its_arguments(bench: Bench) -> Iterator[Finding]:
    """It must not write into the lists it is given."""
    if not (isinstance(bench.call, RewardCall) and bench.call.batched):
        return
    arguments = bench.call.arguments(bench.task, [f" {bench.answer}\n", ""])
    before = repr(arguments)
    bench.call.timed(arguments, SLOW_S * 10)
    if repr(arguments) != before:
        yield finding(
            "error",
            "changes_its_arguments",
            "It writes into the lists it is given",
            "The next reward function, and the log, see other completions.",
            "Work on a copy.",
        )


CHECKS: tuple[Check, ...] = (gold, hacks, robust, bears, keeps_its_arguments)
"""After `steady`, without which their answers would mean nothing."""
