"""What three doctors say about the same logs: thirteen drawn runs, thirty healthy ones, and the time a long log takes.

    python -m venv rivals && rivals/bin/pip install rldoctor rlprobe
    python -m benchmarks.doctors --rivals rivals/bin/python --speed > docs/doctors.md

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
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.doctors.asked import run_command
from benchmarks.doctors.judgement import Doctor, doctors, examine
from benchmarks.doctors.scenarios import HEALTHY, SETTINGS, healthy, scenarios, write


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

Written by `python -m benchmarks.doctors`; the rules of judging are at the head of its `__main__.py`. The logs are drawn, not
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
        yield f"Compared with {run_command([arguments.rivals, '-c', versions]).strip()}\n"
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
