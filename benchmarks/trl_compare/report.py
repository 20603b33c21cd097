"""`docs/benchmarks.md`: the measurements as tables, what they are of, and which goals they miss."""

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.trl_compare.cells import Cell
from benchmarks.trl_compare.measure import BEST, COMPACT, OURS, OURS_BF16, OURS_LESS, SHIPPED

Result = Mapping[str, Any]

HEAD = """# Benchmarks

Written by `make bench`{full}. Do not edit.

leadline and TRL {trl} do the same work on the same machine: one group, a prompt of P tokens, G completions of a quarter to
all of C tokens, SmolLM2-135M. A column says how many times longer TRL takes. **As shipped** is TRL with its defaults on this
machine. **At its best** is TRL made to score only completion positions, as it does on CUDA but not on a CPU, without gradient
checkpointing, and in bfloat16 with weights of that dtype. Only the second says anything about a GPU.

- Sides take turns within one process, called from the same thread (a second OpenMP team would slow both down), {low} to {high}
  times after a warm-up; seconds are medians. Ratios survive other work on the machine, absolute seconds do not.
- Training is on one thread and compared by CPU seconds. Generation and whole steps are on two threads and compared by wall
  seconds: decoding waits for memory, which a second thread shares.
- *Training part*: forward, loss, backward, clipping, AdamW, on given completions. Ours includes its metrics and its ledger.
  *Generation*: transformers' `generate` as TRL calls it, against the hf engine with new weights loaded. *Whole step*: both,
  with a reward; ours also writes its run directory; TRL's outer loop (logging, callbacks) is left out.
- {machine}, torch {torch}, transformers {transformers}, Python {python}.
"""

CAUSES = {
    "training": "the head and the attention are not shared, so short prompts with long completions gain least",
    "generation": "a decode step of eight rows reads each weight once: the linear layers take 18 of its 40 ms with a bf16 copy "
    "(30 of 49 in fp32), attention and some 1,500 small operations the rest, which no dtype makes shorter",
    "memory": "activations of a whole row are kept unless model.gradient_checkpointing is set",
    "gemm": "norms, rotary embeddings, attention and the soft maximum are no multiplications",
}


def write(results: Sequence[Result], path: Path, *, full: bool) -> None:
    """Write the page for the results so far."""
    timed = [r for r in results if "seconds" in r]
    memory = [r for r in results if "bytes" in r]
    grown = [r for r in results if "growth" in r.get("small", {})]
    repetitions = [r["repetitions"] for r in timed] or [0]
    head = HEAD.format(
        full=" (with `--full`)" if full else "",
        low=min(repetitions),
        high=max(repetitions),
        machine=_machine(),
        python=platform.python_version(),
        **{name: version(name) for name in ("trl", "torch", "transformers")},
    )
    sections = [
        head,
        *_timed_section("Training part", "train", timed, clock=0),
        *_timed_section("Generation", "generate", timed, clock=1),
        *_timed_section("Whole step", "step", timed, clock=1),
        *_memory_section(memory),
        *[part for r in grown for part in _growth_section(r)],
        _goals_section(timed, memory, grown),
    ]
    path.write_text("\n".join(sections))


def _timed_section(title: str, part: str, results: Iterable[Result], *, clock: int) -> list[str]:
    """`clock`: 0 compares CPU seconds, 1 wall seconds; both are shown of our side."""
    rows = []
    for result in results:
        cell = Cell.parse(result["cell"])
        if cell.part != part:
            continue
        seconds = result["seconds"]
        for ours in (side for side in (OURS, OURS_BF16) if side in seconds):
            against = [
                seconds[side][clock] / seconds[ours][clock] if side in seconds else math.nan for side in (SHIPPED, BEST)
            ]
            names = {"float32": "fp32", "bfloat16": "bf16"}
            kind = names[cell.dtype] + (", bf16 copy" if ours == OURS_BF16 else "")
            ratios = ["-" if math.isnan(r) else f"**{r:.2f}**" for r in against]
            clocks = [
                f"{cpu:.2f} / {wall:.2f}"
                for cpu, wall in (seconds.get(s, [math.nan] * 2) for s in (SHIPPED, BEST, ours))
            ]
            rows.append([kind, *map(str, (cell.prompt, cell.longest, cell.group)), *ratios, *clocks])
    if not rows:
        return []
    header = [
        "",
        "P",
        "C",
        "G",
        "TRL as shipped / ours",
        "TRL at its best / ours",
        "shipped, CPU / wall s",
        "best, CPU / wall s",
        "ours, CPU / wall s",
    ]
    return [
        f"## {title}\n",
        _table(header, [[c.replace("nan / nan", "-") for c in row] for row in rows]),
        _means(title, part, results, clock),
    ]


def _means(title: str, part: str, results: Iterable[Result], clock: int) -> str:
    lines = []
    for dtype in ("float32", "bfloat16"):
        for ours in (OURS, OURS_BF16):
            means = [ratio_mean(results, part, dtype, side, ours, clock) for side in (SHIPPED, BEST)]
            if not math.isnan(means[0]):
                name = f"{dtype}{', decoding with a bf16 copy' if ours == OURS_BF16 else ''}"
                best = "" if math.isnan(means[1]) else f", {means[1]:.2f} (at its best)"
                lines.append(f"Geometric means, {name}: {means[0]:.2f} (as shipped){best}.")
    return "\n".join(lines) + "\n"


def ratio_mean(results: Iterable[Result], part: str, dtype: str, side: str, ours: str, clock: int) -> float:
    """Geometric mean over the cells of `part` and `dtype` of seconds of `side` by seconds of `ours`; NaN = no cell."""
    cells = [r["seconds"] for r in results if r["cell"].startswith(f"{part}:") and r["cell"].endswith(f":{dtype}")]
    logs = [math.log(s[side][clock] / s[ours][clock]) for s in cells if side in s and ours in s]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _memory_section(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    cells = list(dict.fromkeys(r["cell"] for r in results))
    rows = []
    for name in cells:
        peak = {r["side"]: r["bytes"] / 1e6 for r in results if r["cell"] == name}
        cell = Cell.parse(name)
        own = [peak.get(side, math.nan) for side in (SHIPPED, COMPACT, BEST, OURS, OURS_LESS)]
        shares = [f"{peak.get(a, math.nan) / peak[b]:.2f}" if b in peak else "-" for a, b in MEMORY_RATIOS]
        rows.append(
            [cell.dtype, *map(str, (cell.prompt, cell.longest, cell.group)), *(f"{x:.0f}" for x in own), *shares]
        )
    header = [
        "",
        "P",
        "C",
        "G",
        "shipped",
        "compact",
        "best",
        "ours",
        "ours, recomputing",
        "ours / shipped",
        "ours / compact",
        "recomputing / compact",
    ]
    text = (
        "Peak resident memory of the training part in MB above weights and one gradient, before AdamW allocates; a fresh\n"
        "process each. *Compact* is TRL scoring completion positions only, with its gradient checkpointing.\n"
    )
    return ["## Memory\n", text, _table(header, rows)]


MEMORY_RATIOS = ((OURS, SHIPPED), (OURS, COMPACT), (OURS_LESS, COMPACT))


def _growth_section(result: Result) -> list[str]:
    sections = [
        "## Growth\n",
        "One update of groups of 8 behind prompts of 128, `optimizer.tokens_per_micro` 2048, one thread.\n",
    ]
    for part in (result["small"], result["real"]):
        if part["growth"]:
            rows = [
                [
                    f"{r['tokens']}",
                    f"{r['seconds']:.2f}",
                    f"{1e6 * r['seconds'] / r['tokens']:.0f}",
                    f"{r['bytes'] / 1e6:.0f}",
                ]
                for r in part["growth"]
            ]
            header = ["tokens a step", "CPU s", "µs a token", "peak MB above the start"]
            sections += [f"`{part['model']}`:\n", _table(header, rows)]
    rows = [
        [s["cell"], f"{s['flops_per_s'] / 1e9:.0f}", f"{s['gemm_flops_per_s'] / 1e9:.0f}", f"{_share(s):.0%}"]
        for s in result["real"]["shares"]
    ]
    text = "\nUseful work of the whole update (each prompt once; AdamW's seconds count, its work does not) against bare\nmultiplications of the same row by the model's largest layer, fp32, one thread:\n"
    return [*sections, text, _table(["P x C x G", "GFLOP/s", "bare GFLOP/s", "share"], rows)]


def _share(row: Mapping[str, float]) -> float:
    return row["flops_per_s"] / row["gemm_flops_per_s"]


def _goals_section(timed: Sequence[Result], memory: Sequence[Result], grown: Sequence[Result]) -> str:
    rows = []
    for name, value, goal, cause in goals(timed, memory, grown):
        if math.isnan(value):
            continue
        at_least = goal > 0
        met = value >= goal if at_least else value <= -goal
        sign = "≥" if at_least else "≤"
        rows.append([name, f"{value:.2f}", f"{sign} {abs(goal):g}", "met" if met else f"missed: {CAUSES[cause]}"])
    return "## Goals\n\n" + _table(["", "measured", "goal", ""], rows)


def goals(
    timed: Sequence[Result], memory: Sequence[Result], grown: Sequence[Result]
) -> list[tuple[str, float, float, str]]:
    """(what, measured, goal, cause if missed); a negative goal is a most."""
    fp32 = "float32"
    ratios = [r["seconds"][BEST][0] / r["seconds"][OURS][0] for r in timed if r["cell"].startswith("train:")]
    shares = [_share(s) for r in grown for s in r["real"]["shares"]]

    def train(side: str) -> float:
        return ratio_mean(timed, "train", fp32, side, OURS, 0)

    def at(part: str, shape: str, side: str, ours: str) -> float:
        return ratio_mean([r for r in timed if f":{shape}:" in r["cell"]], part, fp32, side, ours, 1)

    def peak(side: str, other: str) -> float:
        values = {r["side"]: r["bytes"] for r in memory}
        return values[side] / values[other] if {side, other} <= values.keys() else math.nan

    return [
        ("training part, fp32, geometric mean, shipped", train(SHIPPED), 6.0, "training"),
        ("training part, fp32, geometric mean, best", train(BEST), 4.5, "training"),
        ("training part, smallest ratio, best", min(ratios, default=math.nan), 2.0, "training"),
        ("generation 256x64x8, fp32", at("generate", "256x64x8", SHIPPED, OURS), 2.0, "generation"),
        ("generation 256x64x8, bf16 copy", at("generate", "256x64x8", SHIPPED, OURS_BF16), 3.5, "generation"),
        ("whole step 256x128x8, fp32, shipped", at("step", "256x128x8", SHIPPED, OURS), 3.0, "generation"),
        ("whole step 256x128x8, fp32, best", at("step", "256x128x8", BEST, OURS), 2.4, "generation"),
        ("whole step 256x128x8, bf16 copy, shipped", at("step", "256x128x8", SHIPPED, OURS_BF16), 4.2, "generation"),
        ("whole step 256x128x8, bf16 copy, best", at("step", "256x128x8", BEST, OURS_BF16), 3.3, "generation"),
        ("memory above weights and gradient, of shipped", peak(OURS, SHIPPED), -0.3, "memory"),
        ("memory above weights and gradient, of compact", peak(OURS, COMPACT), -0.6, "memory"),
        ("the same, recomputing", peak(OURS_LESS, COMPACT), -0.25, "memory"),
        ("share of the bare multiplication", min(shares, default=math.nan), 0.85, "gemm"),
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in cpus if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()
