"""What three doctors say about the same logs: thirteen drawn runs, thirty healthy ones, and the time a long log takes.

    python -m venv rivals && rivals/bin/pip install rldoctor rlprobe
    python benchmarks/doctors.py --rivals rivals/bin/python --speed > docs/doctors.md

Every log is drawn here from a seed, as TRL writes it. Without --rivals only `leadline doctor` is asked; --million adds
the log of 1 000 000 steps (2.6 GB on disk while it is read). Progress goes to stderr.

Judging. Ours must name the cause first: the first finding has the name that the scenario expects, or it is not right. A
rival may name it anywhere: `Scenario.right` lists the detectors that name the cause, with the words that its title,
summary and first advice must hold where the detector's name alone does not say which cause it means. `Scenario.family`
lists the detectors that see a true symptom of the cause; a rldoctor "plateau" always counts as one. Anything else that
is said is wrong, and a warning on a healthy run is a false alarm. Findings that a tool calls "info" count neither for
nor against it. A tool that fails is reported as failed, never as silent.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Values = float | np.ndarray | Callable[[np.ndarray, np.random.Generator], np.ndarray]
Columns = dict[str, Values]
Row = dict[str, float]

IS_MEAN = "sampling/importance_sampling_ratio/mean"
IS_MAX = "sampling/importance_sampling_ratio/max"
GAP = "sampling/sampling_logp_difference/mean"
LENGTH = "completions/mean_length"
TRUNCATED = "completions/clipped_ratio"
DEAD_GROUPS = "frac_reward_zero_std"
HEALTHY = 30

SETTINGS: Mapping[str, Any] = {
    "learning_rate": 1e-6, "beta": 0.001, "epsilon": 0.2, "num_generations": 8, "num_iterations": 1, "temperature": 1.0,
    "max_completion_length": 256, "max_grad_norm": 1.0, "loss_type": "dapo", "mask_truncated_completions": False,
    "use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "bf16": True, "logging_nan_inf_filter": True, "scale_rewards": "group",
}  # fmt: skip

# Scenarios ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    name: str
    told: str
    cause: str | None
    """The name of our finding, or the names that are right, with a `|` between; None: healthy."""
    rows: list[Row]
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    right: Mapping[str, str] = field(default_factory=dict)
    """Detector of a rival -> words (a regular expression) that it must use, or "" if its name is enough."""
    family: frozenset[str] = frozenset()

    @property
    def expected(self) -> str:
        return (self.cause or "healthy").replace("|", " or ")


def draw(changed: Columns, rows: int = 200, every: int = 1) -> list[Row]:
    """The log of a healthy run with some columns changed."""
    random = np.random.default_rng(1)
    step = np.arange(rows)
    columns: Columns = {
        "loss": random.normal(0, 1e-4, rows),
        "grad_norm": 0.25 + random.normal(0, 0.02, rows),
        "learning_rate": 1e-6,
        "reward": 0.3 + 0.001 * step + random.normal(0, 0.02, rows),
        "reward_std": 0.35 + random.normal(0, 0.02, rows),
        DEAD_GROUPS: np.clip(0.15 + random.normal(0, 0.05, rows), 0, 1),
        "kl": 0.001 + 1e-5 * step,
        "entropy": 0.5 + random.normal(0, 0.01, rows),
        LENGTH: 180 + random.normal(0, 5, rows),
        TRUNCATED: np.clip(0.02 + random.normal(0, 0.01, rows), 0, 1),
        "clip_ratio/region_mean": 0.0,
        **changed,
    }
    drawn = {name: column(step, random) if callable(column) else column for name, column in columns.items()}
    full = {name: np.broadcast_to(column, rows).tolist() for name, column in drawn.items()}
    return [{"step": (i + 1) * every, **{name: full[name][i] for name in full}} for i in range(rows)]


def underflow() -> Columns:
    """Rollout weights that are products over a sequence, and have underflowed."""
    return {
        "loss": 0.0,
        "grad_norm": lambda i, r: 0.005 + r.normal(0, 0.0005, len(i)),
        "reward": lambda i, r: 0.4 + r.normal(0, 0.05, len(i)),
        "reward_std": lambda i, r: r.uniform(0.2, 0.68, len(i)),
        DEAD_GROUPS: 0.0,
        GAP: lambda i, r: 0.071 + r.normal(0, 0.004, len(i)),
        IS_MEAN: lambda i, r: 10 ** r.uniform(math.log10(1.6e-10), math.log10(1.5e-7), len(i)),
        IS_MAX: 6e-7,
        TRUNCATED: 1.0,
        LENGTH: 256.0,
    }


def turns(step: int, before: float, then: float) -> Values:
    return lambda i, r: np.where(i < step, before + r.normal(0, 0.02 * abs(before), len(i)), then)


def flat(level: float) -> Values:
    return lambda i, r: level + r.normal(0, 0.01, len(i))


def scenarios() -> list[Scenario]:
    return [*_weights(), *_dead_or_nan(), *_settings(), *_sound()]


def _weights() -> Iterator[Scenario]:
    cause = "importance-correction-erases-signal|sequence-is-sum-deflates-gradient"  # that it is, or also why it is
    right = {"*": r"importance.(sampling|ratio|weight|correction)"}
    without_cut = {TRUNCATED: 0.02, LENGTH: 200.0}
    yield Scenario("S1", "loss 0.0, weights of 1e-8, all cut; 7 rows", cause, draw(underflow(), 7, 10), right=right)
    yield Scenario("S1L", "the same, 200 rows", cause, draw(underflow()), right=right)
    yield Scenario("S1U", "the same, few cut", cause, draw({**underflow(), **without_cut}), right=right)


def _dead_or_nan() -> Iterator[Scenario]:
    dead: Columns = {
        "loss": 0.0, "grad_norm": 0.0, "reward": 0.0, "reward_std": 0.0, DEAD_GROUPS: 1.0, "kl": 0.0
    }  # fmt: skip
    yield Scenario(
        "S2", "every completion gets the same reward", "zero-reward-variance-within-group", draw(dead),
        right={"advantage_collapse": "", "DEGENERATE_GROUPS": "", "ADV_COLLAPSE": "", "REWARD_STD_DEATH": ""},
        family=frozenset({"gradient_pathology", "GRAD_PATHOLOGY"}),
    )  # fmt: skip
    cause, nan = "nan-poisoned-weights", {"gradient_pathology": r"(?i)nan|non-finite", "GRAD_PATHOLOGY": r"(?i)nan"}
    known = frozenset(nan)
    filtered = np.array([0.51, 0.0, 0.0])
    clean: Columns = {"grad_norm": turns(60, 0.25, math.nan), "loss": 0.0}
    lost: Columns = {
        "reward": turns(61, 0.4, 0.0), "reward_std": turns(61, 0.35, 0.0), DEAD_GROUPS: turns(61, 0.15, 1.0),
        "entropy": turns(61, 0.5, math.nan), "kl": turns(61, 0.001, math.nan),
    }  # fmt: skip
    three = draw({"grad_norm": math.nan, "loss": filtered}, 3)
    yield Scenario("S3", "NaN gradients from the start, 3 rows", cause, three, right=nan, family=known)
    yield Scenario("S3C", "NaN gradients from step 61, loss reads 0.0", cause, draw(clean), right=nan, family=known)
    yield Scenario("S3L", "the same, and the run collapses", cause, draw({**clean, **lost}), right=nan, family=known)


def _settings() -> Iterator[Scenario]:
    heavy: Columns = {"kl": lambda i, r: 0.64 * (1 - np.exp(-i / 3)), "reward": flat(0.3)}
    rows = draw(heavy)
    yield Scenario(
        "S4", "beta 0.5: the loss is the KL term", "beta-mis-scaled",
        [{**row, "loss": 0.5 * row["kl"]} for row in rows], {**SETTINGS, "beta": 0.5},
        right={"kl_drift": r"(?i)(lower|reduce|decrease)\W+(the )?(beta|kl)", "KL_BLOWUP": r"(?i)(lower|reduce) (the )?(beta|kl)"},
        family=frozenset({"kl_drift", "KL_BLOWUP"}),
    )  # fmt: skip
    fast: Columns = {
        "learning_rate": 2e-5,
        "entropy": lambda i, r: 0.02 + 0.78 * np.exp(-i / 40) + r.normal(0, 0.002, len(i)),
        "kl": lambda i, r: 0.001 * np.exp(i / 25).clip(0, 4000),
        DEAD_GROUPS: lambda i, r: np.clip(0.15 + i / 220 + r.normal(0, 0.02, len(i)), 0, 0.95),
        "reward": lambda i, r: 0.3 + 0.2 * np.exp(-(((i - 60) / 40) ** 2)) + r.normal(0, 0.01, len(i)),
    }
    yield Scenario(
        "S5", "learning rate 2e-5, all weights trained", "learning-rate-too-high", draw(fast),
        {**SETTINGS, "learning_rate": 2e-5, "beta": 0.0}, right={"*": r"(?i)learning.rate"},
        family=frozenset({"kl_drift", "KL_BLOWUP", "entropy_collapse", "ENTROPY_COLLAPSE"}),
    )  # fmt: skip
    narrow: Columns = {
        "clip_ratio/region_mean": flat(0.7), "kl": 9e-4, "grad_norm": flat(0.012), "reward": flat(0.3)
    }  # fmt: skip
    widen = r"(?i)(widen|raise|increase|larger)[^.]*(epsilon|clip)|epsilon[^.]*(small|narrow)"
    yield Scenario(
        "S6", "epsilon 0.0002", "clip-range-too-narrow",
        [{**row, "grad_norm": abs(row["grad_norm"])} for row in draw(narrow)],
        {**SETTINGS, "epsilon": 0.0002, "num_iterations": 2},
        right={"clip_saturation": widen, "CLIP_SATURATION": widen},
        family=frozenset({"clip_saturation", "CLIP_SATURATION"}),
    )  # fmt: skip
    masked: Columns = {
        "loss": 0.0, "grad_norm": 0.0, "reward": flat(0.3), "reward_std": flat(0.31), DEAD_GROUPS: 0.1, TRUNCATED: 1.0,
        LENGTH: 256.0,
    }  # fmt: skip
    yield Scenario(
        "S9", "cut completions are masked, and all are cut", "all-completions-masked", draw(masked),
        {**SETTINGS, "mask_truncated_completions": True}, right={"*": r"(?i)(is|are|were) (all )?masked|masked out"},
        family=frozenset({"gradient_pathology", "length_pathology", "TRUNCATION_STARVE"}),
    )  # fmt: skip


def _sound() -> Iterator[Scenario]:
    exact: Columns = {"loss": 0.0, "grad_norm": flat(0.3), IS_MEAN: 0.985, IS_MAX: 1.4, GAP: 0.011}
    yield Scenario("S7", "healthy", None, draw({}))
    yield Scenario("S8", "healthy, loss exactly 0.0", None, draw(exact))


def healthy(seed: int) -> Scenario:
    """200 or 400 rows: reward rises, entropy falls slowly from any level, KL small or absent, loss is noise around 0."""
    random = np.random.default_rng(1000 + seed)
    rows = int(random.choice([200, 400]))
    level, decay = float(random.choice([0.25, 0.45, 0.7, 1.3, 2.0])), random.uniform(0.05, 0.3)
    start, rise, way = random.uniform(0.1, 0.5), random.uniform(0.1, 0.4), np.linspace(0, 1, rows)
    columns: Columns = {
        "loss": random.normal(0, float(random.choice([1e-8, 1e-3, 2e-2])), rows),
        "grad_norm": np.abs(random.uniform(0.1, 1.5) * (1 + random.normal(0, 0.1, rows))),
        "reward": np.clip(start + rise * way + random.normal(0, 0.03, rows), 0, 1),
        "reward_std": np.abs(0.35 + random.normal(0, 0.03, rows)),
        DEAD_GROUPS: np.clip(random.uniform(0.05, 0.25) + random.normal(0, 0.05, rows), 0, 1),
        "entropy": level * (1 - decay * way) + random.normal(0, 0.01 * level, rows),
        "kl": np.abs(random.uniform(0.005, 0.09) * way + random.normal(0, 2e-4, rows)),
        LENGTH: 150 + random.uniform(0, 40) * way + random.normal(0, 5, rows),
        IS_MEAN: 0.985 + random.normal(0, 0.003, rows),
        GAP: np.abs(0.012 + random.normal(0, 0.001, rows)),
    }
    log = draw(columns, rows)
    beta = float(random.choice([0.0, 0.001, 0.04]))
    if not beta:
        log = [{name: value for name, value in row.items() if name != "kl"} for row in log]
    return Scenario(f"healthy {seed + 1}", "", None, log, {**SETTINGS, "beta": beta})


def write(scenario: Scenario, directory: Path) -> tuple[Path, Path]:
    """The rows with the settings in a first line, and a trainer_state.json, which has no settings."""
    directory.mkdir(parents=True)
    lines = directory / "metrics.jsonl"
    with lines.open("w") as file:
        for entry in ({"config": dict(scenario.settings)}, *scenario.rows):
            file.write(json.dumps(entry) + "\n")
    state = directory / "state" / "trainer_state.json"
    state.parent.mkdir()
    last = scenario.rows[-1]["step"]
    state.write_text(json.dumps({"global_step": last, "max_steps": last, "log_history": scenario.rows}))
    return lines, state


# The doctors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """A finding that counts, in its doctor's order."""

    name: str
    words: str = ""


RECORD = """
import json, sys, types
transformers = types.ModuleType("transformers")  # of which rlprobe's hook needs one class, to inherit nothing from
transformers.TrainerCallback = object
sys.modules["transformers"] = transformers
from rlprobe.integrations.trl import RlprobeCallback
from types import SimpleNamespace as Namespace
settings, *rows = [json.loads(line) for line in open(sys.argv[1])]
args = Namespace(to_dict=lambda: settings["config"], world_size=1, process_index=0)
hook = RlprobeCallback(sys.argv[2])
hook.on_train_begin(args, Namespace(global_step=0), None)
for row in rows:
    hook.on_log(args, Namespace(global_step=row.pop("step")), None, logs=row)
hook.on_train_end(args, Namespace(global_step=0), None)
"""
RLPROBE = "from rlprobe.cli import app; app()"
RLDOCTOR = "import sys; from rl_doctor.cli import main; sys.exit(main())"


def ask_leadline(log: Path) -> list[Said]:
    answer = _json([sys.executable, "-m", "leadline", "doctor", str(log), "--format", "json"])
    return [Said(finding["name"]) for finding in answer["findings"]]


def ask_rldoctor(python: str, log: Path) -> list[Said]:
    findings = _json([python, "-c", RLDOCTOR, "diagnose", str(log), "--format", "json"])["findings"]
    counted = [finding for finding in findings if finding["severity"] in ("WARNING", "CRITICAL")]
    return [Said(f["detector"], " ".join((f["title"], f["summary"], *f["prescription"][:1]))) for f in counted]


def ask_rlprobe(python: str, log: Path) -> list[Said]:
    recording = log.parent / "rlprobe"
    _run([python, "-c", RECORD, str(log), str(recording)])
    answer = _json([python, "-c", RLPROBE, "doctor", str(recording), "--json"])
    findings = answer if isinstance(answer, list) else answer["findings"]
    counted = [finding for finding in findings if finding["severity"] in ("warn", "critical")]
    return [Said(f["signature_id"], " ".join((f["explanation"], *f["suggested_actions"][:1]))) for f in counted]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _json(command: Sequence[str]) -> Any:
    return json.loads(_run(command))


# Judgement ------------------------------------------------------------------------------------------------------------


def judge_ours(scenario: Scenario, said: Sequence[Said]) -> str:
    names = [finding.name for finding in said]
    if scenario.cause is None:
        return "false alarm" if names else "right"
    if not names:
        return "silent"
    causes = scenario.cause.split("|")
    return "right" if names[0] in causes else "family" if set(causes) & set(names) else "wrong"


def judge_rival(scenario: Scenario, said: Sequence[Said]) -> str:
    if scenario.cause is None:
        return "false alarm" if said else "right"
    if not said:
        return "silent"
    if any(_names_the_cause(scenario, finding) for finding in said):
        return "right"
    return "family" if any(finding.name in {*scenario.family, "plateau"} for finding in said) else "wrong"


def _names_the_cause(scenario: Scenario, finding: Said) -> bool:
    words = scenario.right.get(finding.name, scenario.right.get("*"))
    return words is not None and bool(re.search(words, finding.words))


@dataclass(frozen=True)
class Doctor:
    name: str
    ask: Callable[[Path], list[Said]]
    judge: Callable[[Scenario, Sequence[Said]], str]
    reads_states: bool
    """Reads trainer_state.json as well."""


def doctors(rivals: str | None) -> list[Doctor]:
    ours = Doctor("leadline", ask_leadline, judge_ours, True)
    if rivals is None:
        return [ours]
    return [
        ours,
        Doctor("rldoctor", lambda log: ask_rldoctor(rivals, log), judge_rival, True),
        Doctor("rlprobe", lambda log: ask_rlprobe(rivals, log), judge_rival, False),
    ]


def examine(doctor: Doctor, scenario: Scenario, log: Path) -> tuple[str, str]:
    """The judgement, and what was said in short."""
    try:
        said = doctor.ask(log)
    except (RuntimeError, ValueError, KeyError) as error:
        print(f"{doctor.name} failed on {scenario.name}: {error}", file=sys.stderr)
        return "failed", "failed"
    return doctor.judge(scenario, said), ", ".join(finding.name for finding in said) or "nothing"


# The report -----------------------------------------------------------------------------------------------------------


def matrix(asked: Sequence[Doctor], directory: Path) -> Iterator[str]:
    """A table of judgements, one of what was said, and the count per judgement."""
    cells: list[list[str]] = []
    said: list[str] = []
    for scenario in scenarios():
        print(f"{scenario.name} ...", file=sys.stderr)
        lines, state = write(scenario, directory / scenario.name)
        answers = [examine(doctor, scenario, lines) for doctor in asked]
        bare = [examine(doctor, scenario, state) if doctor.reads_states else None for doctor in asked]
        cells.append([cell(*both) for both in zip(answers, bare, strict=True)])
        said.append(row(scenario.name, scenario.expected, *(words for _, words in answers)))
    names = [doctor.name for doctor in asked]
    yield from heading("scenario", "the log", "expected", *names)
    for scenario, judged in zip(scenarios(), cells, strict=True):
        yield row(scenario.name, scenario.told, scenario.expected, *judged)
    yield ""
    yield from heading("of 11 faults, with settings", *names)
    faults = [judged for scenario, judged in zip(scenarios(), cells, strict=True) if scenario.cause]
    for judgement in ("right", "family", "wrong", "silent", "failed"):
        yield row(
            judgement, *(str(sum(cell[i].split(" (")[0] == judgement for cell in faults)) for i in range(len(asked)))
        )
    yield from ("", "What each said, in its own order (with settings, without what it calls info):", "")
    yield from heading("scenario", "expected", *names)
    yield from said


def cell(answer: tuple[str, str], bare: tuple[str, str] | None) -> str:
    judged, _ = answer
    return judged if bare is None or bare[0] == judged else f"{judged} ({bare[0]} without settings)"


def alarms(asked: Sequence[Doctor], directory: Path) -> Iterator[str]:
    counts = dict.fromkeys((doctor.name for doctor in asked), 0)
    for seed in range(HEALTHY):
        scenario = healthy(seed)
        lines, _ = write(scenario, directory / f"healthy-{seed}")
        for doctor in asked:
            judged, words = examine(doctor, scenario, lines)
            counts[doctor.name] += judged != "right"
            if judged != "right":
                print(f"{doctor.name} on {scenario.name}: {judged}: {words}", file=sys.stderr)
    yield from heading("", *counts)
    yield row("false alarms (or failures)", *(f"{count} of {HEALTHY}" for count in counts.values()))


def heading(*titles: str) -> tuple[str, str]:
    return row(*titles), "|" + "---|" * len(titles)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# Speed ----------------------------------------------------------------------------------------------------------------


def write_long(path: Path, steps: int, metrics: int = 60) -> None:
    """A healthy run of many steps; what TRL's names leave free is filled with reward functions."""
    base = healthy(0).rows
    functions = metrics - len(base[0]) + 1  # the step is no metric
    filler = {f"rewards/judge_{number}/mean": 0.25 + 0.01 * number for number in range(functions)}
    random = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(json.dumps({"config": dict(SETTINGS)}) + "\n")
        for step in range(1, steps + 1):
            drawn = random.normal(0, 0.01, functions).tolist()
            judged = {name: level + noise for (name, level), noise in zip(filler.items(), drawn, strict=True)}
            file.write(json.dumps({**base[step % len(base)], **judged, "step": step}) + "\n")


def measure(command: Sequence[str]) -> tuple[float, float, float, int]:
    """Seconds on the wall, seconds of CPU, peak GiB, and the exit status of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, process.returncode


def speed(directory: Path, million: bool) -> Iterator[str]:
    yield from heading("steps x metrics", "file, MB", "wall, s", "CPU, s", "peak memory, GiB", "exit code")
    for steps in (1_000, 100_000, *([1_000_000] if million else [])):
        path = directory / f"{steps}.jsonl"
        print(f"{steps} steps ...", file=sys.stderr)
        write_long(path, steps)
        size = path.stat().st_size / 1e6
        wall, cpu, memory, status = measure([sys.executable, "-m", "leadline", "doctor", str(path), "--format", "json"])
        path.unlink()
        yield row(f"{steps:,} x 60", f"{size:.0f}", f"{wall:.2f}", f"{cpu:.2f}", f"{memory:.2f}", str(status))


INTRODUCTION = """# Doctors, side by side

Written by `python benchmarks/doctors.py`; the rules of judging are at the head of that file. The logs are drawn, not
recorded: they show what a doctor says of a clean instance of a fault, not how often it is right in the field, and the
faults were known when ours was written. Faults induced in the real trainer: [drills.md](drills.md).

"right": the cause is named (ours: by the first finding; a rival: by any). "family": a true symptom, or not ranked first.
"wrong": only other causes. "silent": nothing. The same log is read with its settings (`metrics.jsonl`) and without
(`trainer_state.json`); rlprobe reads no logs and is fed through its own TRL hook.

Findings that a tool calls "info" do not count: rldoctor has one on S1U (the reward is flat) and two on S4 (the same, and
a KL that is elevated, with the advice to raise its coefficient). In S1, S1L and S1U two names of ours are right: that
the weights erase the signal, and the reason, that they multiply over the sequence, as the settings say. Ours reports the
second and names the first as its consequence.
"""


def report(arguments: argparse.Namespace, directory: Path) -> Iterator[str]:
    asked = doctors(arguments.rivals)
    yield INTRODUCTION
    if arguments.rivals:
        versions = (
            "from importlib.metadata import version as v; print(f\"rldoctor {v('rldoctor')}, rlprobe {v('rlprobe')}.\")"
        )
        yield f"Compared with {_run([arguments.rivals, '-c', versions]).strip()}\n"
    yield "## Scenarios\n"
    yield from matrix(asked, directory)
    yield f"\n## {HEALTHY} varied healthy runs\n"
    yield from alarms(asked, directory)
    if arguments.speed or arguments.million:
        yield "\n## Speed of `leadline doctor`\n"
        yield "A healthy log is read and diagnosed in a fresh process, one at a time; imports and the JSON report included.\n"
        yield from speed(directory, arguments.million)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare doctors on the same logs; Markdown to standard output.")
    parser.add_argument("--rivals", metavar="PYTHON", help="a Python that has rldoctor and rlprobe")
    parser.add_argument("--speed", action="store_true", help="measure 100 000 steps of 60 metrics")
    parser.add_argument("--million", action="store_true", help="and 1 000 000 steps")
    with tempfile.TemporaryDirectory() as directory:
        for line in report(parser.parse_args(), Path(directory)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
