"""Reward functions as users write them, each with one fault, by the name under which it must be found."""

import random
import re
import signal
import time

WORDS = {}


def boxed(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1] if found else None


def gold_not_rewarded(completions, answer, **kwargs):
    return [0.0 for _ in completions]


def sign_flipped(completions, answer, **kwargs):
    return [-1.0 if boxed(c) == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def brief(completion, answer):
    return float(boxed(completion) == answer) - len(completion) / 5


def wrong_answer_rewarded(completions, **kwargs):
    return [1.0 if boxed(c) is not None else 0.0 for c in completions]


def every_answer_rewarded(completion, answer):
    return float(answer in completion)


def echo_rewarded(completion, answer):
    return float(boxed(completion) in (answer, ""))


def scalar(completions, answer):
    return sum(boxed(c) == a for c, a in zip(completions, answer, strict=True)) / len(completions)


def wrong_type(completion, answer):
    return {"correct": boxed(completion) == answer}


def nan_on_parse_failure(completion, answer):
    return float(boxed(completion) == answer) if completion else float("nan")


def raises_on_cut(completion, answer):
    return float(re.search(r"\\boxed\{(.*)\}", completion)[1] == answer) if "\\boxed{" in completion else 0.0


def main_thread(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return float(boxed(completion) == answer)


def racing(completion, answer):
    WORDS["text"] = completion
    time.sleep(0.001)
    return float(boxed(WORDS["text"]) == answer)


def noisy(completion, answer):
    return float(boxed(completion) == answer) + random.random() / 100


def normalised(completions, answer, **kwargs):
    right = [float(boxed(c) == a) for c, a in zip(completions, answer, strict=True)]
    return [r - sum(right) / len(right) for r in right]


def writes(completions, answer, **kwargs):
    for i, text in enumerate(completions):
        completions[i] = text.strip()
    return [float(boxed(c) == a) for c, a in zip(completions, answer, strict=True)]


def eos_sensitive(completion, answer):
    return float(bool(re.search(r"\\boxed\{" + answer + r"\}$", completion.rstrip())))


ERRORS = {
    "gold_not_rewarded": gold_not_rewarded,
    "sign_flipped": sign_flipped,
    "empty_rewarded": brief,
    "wrong_answer_rewarded": wrong_answer_rewarded,
    "every_answer_rewarded": every_answer_rewarded,
    "echo_rewarded": echo_rewarded,
    "scalar_for_vector": scalar,
    "returned_wrong_type": wrong_type,
    "not_finite": nan_on_parse_failure,
    "raises": raises_on_cut,
    "not_thread_safe": main_thread,
    "not_thread_safe ": racing,
    "not_deterministic": noisy,
    "depends_on_the_batch": normalised,
    "changes_its_arguments": writes,
}
NOTES = {"eos_sensitive": eos_sensitive}
