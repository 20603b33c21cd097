"""Induces every cause on every architecture, asks the engine probe for the cause, and writes docs/probe-causes.md.

    python benchmarks/probe_causes.py                 with the hf engine, in float32 and in bfloat16, and with real vLLM
    python benchmarks/probe_causes.py hf bfloat16     without vLLM

What was measured is appended to --rows; the page is made of the latest row of each case there.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from transformers.utils.logging import set_verbosity_error  # noqa: E402

from leadline.probes.engine.attribute import Attribution, attribute  # noqa: E402
from tests.probes.engine.architectures import architecture  # noqa: E402
from tests.probes.engine.induced import COMMON, EVERYWHERE, SPECIAL, drawn_across, probed  # noqa: E402
from tests.probes.engine.served import DONE, STARTS, served  # noqa: E402

ITSELF = {"bfloat16", "bfloat16, as accepted", "weights rounded to bfloat16", "old prefix cache", "experts in bfloat16"}
"""Causes that are about the engine's precision, or that no half-precision engine is behind: once only."""


@dataclass(frozen=True)
class Row:
    engine: str
    architecture: str
    induced: str
    expected: str
    named: str
    detail: str
    gap: float
    explained: float
    left: float
    seconds: float

    @property
    def right(self) -> bool:
        return self.named == self.expected


def row(engine: str, family: str, induced: str, expected: str, found: Attribution, started: float) -> Row:
    verdict = found.verdict
    took = time.process_time() - started
    return Row(
        engine,
        family,
        induced,
        expected,
        verdict.cause,
        verdict.detail,
        found.gap.mean_abs,
        verdict.explained,
        verdict.left,
        took,
    )


def in_process(half: bool) -> Iterator[Row]:
    """The hf engine; with `half` it computes in bfloat16 besides, which both sides accept."""
    cases = [(n, f, c, make) for f in COMMON for n, (c, make) in EVERYWHERE.items()]
    cases += [(n, f, c, make) for n, (f, c, make) in SPECIAL.items()]
    for name, family, cause, make in cases:
        if half and name in ITSELF:
            continue
        started = time.process_time()
        seam = make(architecture(family))
        if half:
            seam = replace(seam, dtype="bfloat16", known={**seam.known, "dtypes": ("float32", "bfloat16")})
        engine = "hf, bfloat16" if half else "hf"
        yield row(engine, family, name, cause, attribute(drawn_across(seam), probed(seam)), started)


def by_servers() -> Iterator[Row]:
    for name, start in STARTS.items():
        with tempfile.TemporaryDirectory() as directory, served(start, Path(directory)) as running:
            for _, done, cause, induce in (one for one in DONE if one[0] == name):
                started = time.process_time()
                try:
                    found = attribute(*induce(running))
                except Exception:
                    traceback.print_exc()
                    continue
                yield row("vLLM", name, done, cause, found, started)


def document(rows: Sequence[Row]) -> str:
    """The confusion matrix, and what was not named rightly."""
    engines = dict.fromkeys(one.engine for one in rows)
    lines = [
        "# The engine probe: what was induced, and what was named",
        "",
        "Written by `python benchmarks/probe_causes.py`. Each line is a cause that was really induced, in an engine that",
        "draws from a small random model (two layers, bytes) as told; `named` counts what the probe named first.",
        "`hf, bfloat16`: the same causes under an engine that computes in bfloat16 besides, which the probe is told.",
        "The limits of `judge.py` were set while looking at such cases: the page shows that each cause can be told from the",
        "others, not how often the probe errs on models that it has not seen.",
        "",
        "| engine | induced | named rightly | architectures | mean gap, nats | CPU seconds a probe |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for engine in engines:
        own = [one for one in rows if one.engine == engine]
        right, kinds = sum(one.right for one in own), len({one.architecture for one in own})
        seconds = sum(one.seconds for one in own) / len(own)
        took = "not measured" if math.isnan(seconds) else f"{seconds:.1f}"
        gap = sum(one.gap for one in own) / len(own)
        lines.append(f"| {engine} | {len(own)} | {right} ({right / len(own):.1%}) | {kinds} | {gap:.2g} | {took} |")
    for engine in engines:
        lines += ["", f"## {engine}", "", *matrix([one for one in rows if one.engine == engine])]
    wrong = [one for one in rows if not one.right]
    lines += ["", "## Not named rightly", ""]
    lines += [
        f"- {one.engine}, {one.architecture}: {one.induced} ({one.expected}, {one.gap:.2g} nats a token) was named "
        f"`{one.named}`{': ' + one.detail if one.detail else ''}"
        for one in wrong
    ] or ["None."]
    return "\n".join(lines) + "\n"


def matrix(rows: Sequence[Row]) -> list[str]:
    """The confusion matrix without its zeros: what was induced, and how often what was named."""
    lines = [
        "| induced | times | named | on | mean gap, nats | left, nats |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cause in dict.fromkeys(one.expected for one in rows):
        own = [one for one in rows if one.expected == cause]
        named = ", ".join(f"{name} {count}" for name, count in Counter(one.named for one in own).most_common())
        on = ", ".join(dict.fromkeys(one.architecture for one in own))
        gap, left = (sum(values) / len(own) for values in ([one.gap for one in own], [one.left for one in own]))
        lines.append(f"| {cause} | {len(own)} | {named} | {on} | {gap:.2g} | {left:.2g} |")
    return lines


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "hf": lambda: in_process(False),
    "bfloat16": lambda: in_process(True),
    "vllm": by_servers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=Path, default=ROOT / "runs/probe_causes.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/probe-causes.md")
    arguments = parser.parse_args()
    set_verbosity_error()
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    with arguments.rows.open("a") as file:
        for part in arguments.parts:
            for one in PARTS[part]():
                print("right" if one.right else "WRONG", one, flush=True)
                file.write(json.dumps(asdict(one)) + "\n")
    latest = {
        (one.engine, one.architecture, one.induced): one
        for one in (Row(**json.loads(line)) for line in arguments.rows.read_text().splitlines())
    }
    rows = sorted(latest.values(), key=lambda one: one.engine)
    arguments.out.write_text(document(rows))
    return 0 if all(one.right for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
