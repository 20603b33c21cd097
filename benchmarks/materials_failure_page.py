"""The page and the plots of `materials_failure.py`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.materials_failure import (
    CAP,
    GAP,
    HIGH,
    KL_WEIGHT,
    LONG,
    LONG_FACTOR,
    LOW,
    MASK,
    RAW,
    REPORTED,
    REPORTED_GAP,
    SPREAD,
    TENFOLD,
    WARM,
    WHOLE,
    WIDE_CAP,
    Reading,
    Story,
    Told,
)

TOKENS = 150
"""In a completion of the report."""
NAME = "materials-failure"
FLOOR = 1e-15
GOOD, SHRUNK, MASKED = "#2a7f62", "#e0a030", "#b03a48"
COLORS = {"right": "#2a7f62", LOW: "#d08050", TENFOLD: "#b03a48", HIGH: "#3b6fb6", LONG: "#8a5fb0"}


def write(story: Story, directory: Path) -> None:
    """The page and its three plots are in the directory."""
    matplotlib.rcParams.update({"svg.hashsalt": NAME, "font.size": 9, "axes.spines.top": False})
    for name, draw in (("ratios", draw_ratios), ("ledger", draw_ledger), ("steps", draw_steps)):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        draw(figure, story.told)
        figure.savefig(directory / f"{NAME}-{name}.svg", metadata={"Date": None})
    (directory / f"{NAME}.md").write_text(page(story))


# ---- plots


def label(told: Told) -> str:
    return f"{told.variant.engine}: {told.variant.correction}"


def _rows(axes: Axes, told: Sequence[Told]) -> None:
    axes.set_yticks(range(len(told)), [label(one) for one in told])
    axes.invert_yaxis()


def draw_ratios(figure: Figure, told: Sequence[Told]) -> None:
    """Each completion's pi_old / mu, a dot; the cap, a line."""
    axes = figure.subplots()
    for place, one in enumerate(told):
        logs = np.array(one.log_ratios) / math.log(10)
        axes.plot(logs, np.full(len(logs), place), "|", color=COLORS[one.variant.engine], alpha=0.6, markersize=9)
    axes.axvline(math.log10(CAP), color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"log10 of pi_old / mu over a completion (dashed: the cap of {CAP:g})")
    _rows(axes, told)


def draw_ledger(figure: Figure, told: Sequence[Told]) -> None:
    """What reached the gradient, what the weights shrank, what they masked."""
    axes = figure.subplots()
    floor = np.zeros(len(told))
    for stage, color in (("reached", GOOD), ("importance_shrunk", SHRUNK), ("importance_masked", MASKED)):
        shares = np.array([max(0.0, one.mean(f"ledger/{stage}_share")) for one in told])
        axes.barh(range(len(told)), shares, left=floor, color=color, label=stage.replace("_", " "))
        floor += shares
    axes.set_xlabel("share of the signal (above 1: weights above 1 enlarged it)")
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    _rows(axes, told)


def draw_steps(figure: Figure, told: Sequence[Told]) -> None:
    """|loss| and gradient norm by step; 0 is drawn at the floor."""
    for axes, metric, title in zip(
        figure.subplots(1, 2), ("loss", "optimizer/grad_norm"), ("|loss|", "gradient norm"), strict=True
    ):
        for one in told:
            steps, values = [row["step"] for row in one.rows], [max(abs(row[metric]), FLOOR) for row in one.rows]
            style = "--" if MASK[0] in one.variant.settings else "-"
            axes.plot(steps, values, style, marker="o", markersize=3, color=COLORS[one.variant.engine])
        axes.set_yscale("log")
        axes.set_xticks(steps)
        axes.set_xlabel(f"step (dashed: sequence_mask; 0 is drawn at {FLOOR:g})")
        axes.set_title(title)
    engines = dict.fromkeys(one.variant.engine for one in told)
    figure.legend(
        [Line2D([], [], color=COLORS[name]) for name in engines],
        engines,
        loc="outside upper center",
        ncols=len(engines),
        frameon=False,
    )


# ---- the page


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measured(told: Sequence[Told]) -> str:
    def row(one: Told) -> list[str]:
        ratios = np.exp(np.array(one.log_ratios))
        return [
            one.variant.engine,
            one.variant.correction,
            f"{one.mean('importance/log_ratio_mean'):+.3f}",
            f"{one.mean('importance/log_ratio_abs_mean'):.3f}",
            f"{np.min(ratios):.1e} / {np.median(ratios):.1e} / {np.max(ratios):.1e}",
            *(f"{one.mean(f'ledger/importance_{stage}_share'):.1%}" for stage in ("masked", "shrunk")),
            f"{one.mean('ledger/reached_share'):.1%}",
            " ".join(f"{row['loss']:+.4f}" for row in one.rows),
            " ".join(f"{row['optimizer/grad_norm']:.2g}" for row in one.rows),
            f"{one.mean('optimizer/update_norm'):.1e}",
        ]

    header = (
        "engine,correction,mean gap,mean gap abs.,sequence ratio min / median / max,masked,shrunk,reached,"
        "loss by step,gradient norm by step,weights moved by"
    )
    return table(header.split(","), [row(one) for one in told])


def found(told: Sequence[Told]) -> str:
    def row(one: Told) -> list[str]:
        change = f"{one.remedy}: {one.restored:.0%} reaches the gradient" if one.remedy else "nothing to bring back"
        return [one.variant.engine, one.variant.correction, _names(one), change]

    return table(["engine", "correction", "`leadline doctor`", "`leadline replay`"], [row(one) for one in told])


def _names(told: Told) -> str:
    return ", ".join(f"`{name}`" for name in told.findings) or "nothing"


def sampling(readings: Sequence[Reading]) -> str:
    rows = [
        [
            one.engine,
            one.trainer,
            f"{one.mean:+.3f}",
            f"{one.mean_abs:.3f}",
            f"{one.sequence:.1e}",
            f"{math.exp(TOKENS * one.mean):.0e}",
        ]
        for one in readings
    ]
    header = ["engine reports", "trainer scores", "mean gap", "mean gap abs.", "median ratio", f"over {TOKENS} tokens"]
    return table(header, rows)


def refusals(told: Sequence[Told]) -> str:
    """What the preflight said of each wrong engine, once."""
    firsts = {one.variant.engine: one.refused for one in told if one.refused}
    return "\n".join(f"- *{engine}*: {said}" for engine, said in firsts.items())


def compared(story: Story, one: Callable[[str, str], Told]) -> str:
    """The reported run, point by point."""
    rows = [*_of_the_ratio(one), *_of_the_update(one), *_of_the_rest(story, one)]
    return table(["the report says", "here", "what the numbers support"], rows)


def _of_the_ratio(one: Callable[[str, str], Told]) -> list[list[str]]:
    low, ten, high = one(LOW, "sequence_mask"), one(TENFOLD, "sequence_mask"), one(HIGH, "sequence_mask")
    mean_ratio = REPORTED[0][-1]
    return [
        [
            f"a gap of {REPORTED_GAP} nats a token",
            f"set: mean {-GAP}, spread {SPREAD}; measured mean of its absolute value: "
            f"{low.mean('importance/log_ratio_abs_mean'):.3f}",
            f"That metric is a mean of absolute values: it has no sign. All one way, {REPORTED_GAP} over {TOKENS} tokens "
            f"would be {math.exp(-REPORTED_GAP * TOKENS):.0e}; the mean ratio of {mean_ratio} is "
            f"{math.log(mean_ratio) / TOKENS:+.2f} a token. A mean with a spread of about its size fits both.",
        ],
        [
            "ratios of 2e-23 to 1e-8 over a completion",
            f"{math.exp(min(ten.log_ratios)):.0e} to {math.exp(max(ten.log_ratios)):.0e} (tenfold, for completions are a "
            f"tenth as long); median {_median(low):.0e} with the gap as it is",
            "Supported by a small gap a token and many tokens, and by nothing else.",
        ],
        [
            "the sign: ratios below 1",
            f"median {_median(low):.1g} ({LOW}), {_median(high):.1g} ({HIGH}), "
            f"{_median(one(LONG, 'sequence_mask')):.1g} ({LONG})",
            "Supported: the trainer gives the tokens less than the engine says it gave them. So does any engine that "
            "samples from another distribution and says so.",
        ],
        [
            f"`sequence_mask` (cap {CAP:g}) zeroes every sequence",
            f"masked {ten.mean('ledger/importance_masked_share'):.0%}, "
            f"shrunk {ten.mean('ledger/importance_shrunk_share'):.2%}; with the other sign masked "
            f"{high.mean('ledger/importance_masked_share'):.0%}",
            "Not supported: the ratios are far below the cap, and without a lower bound nothing is masked. The signal is "
            "multiplied by numbers near 0, which is as dead; another cap would not have helped.",
        ],
    ]


def _of_the_update(one: Callable[[str, str], Told]) -> list[list[str]]:
    right, ten = one("right", "sequence_mask"), one(TENFOLD, "sequence_mask")
    kl, cut = one(TENFOLD, "sequence_mask, and a KL term"), one(LOW, "token_truncate, cap 10")
    norms = [row[2] for row in REPORTED]
    largest, healthy = (max(abs(row["loss"]) for row in told.rows) for told in (ten, right))
    return [
        [
            "loss 0.0 at every step",
            f"at most {largest:.0e} in size; right engine: up to {healthy:.0e}",
            "A log of four digits writes both 0 and 1e-10 as 0.0. The healthy loss is small too: on policy its mean is 0 "
            "and only its gradient counts. A loss of 0 alone proves nothing; the gradient norm does.",
        ],
        [
            f"gradient norm {min(norms)} to {max(norms)}: the corpse twitching",
            f"{_norms(ten)}; right engine: {_norms(right)}; with a KL term of {KL_WEIGHT}: {_norms(kl)}",
            "Weights of 1e-10 leave 1e-10 of a gradient, and the reported norm does not follow the reported ratio. "
            "Something else pulled; a KL term would, but the report names none.",
        ],
        [
            "the model learned nothing, stably",
            f"weights moved by {ten.mean('optimizer/update_norm'):.1e} a step; right engine: "
            f"{right.mean('optimizer/update_norm'):.1e}; with the KL term: {kl.mean('optimizer/update_norm'):.1e}",
            "Adam divides by the size of the gradient: what is left of it, or a KL term, may move the weights as far as a "
            "signal would. That nothing was learned does not say that nothing moved.",
        ],
        [
            f"`token_truncate` with cap {WIDE_CAP:g} brings the loss back",
            f"reached {cut.mean('ledger/reached_share'):.0%}, gradient norm {_norms(cut)}",
            "Supported. What it trains on is still weighted by the gap, token by token.",
        ],
    ]


def _of_the_rest(story: Story, one: Callable[[str, str], Told]) -> list[list[str]]:
    right, ten = one("right", "sequence_mask"), one(TENFOLD, "sequence_mask")
    whole = next(r for r in story.readings if (r.engine, r.trainer) == (WHOLE, WARM))
    raw = next(r for r in story.readings if (r.engine, r.trainer) == (RAW, WARM))
    return [
        [
            "rewards and their spread are healthy",
            f"mean reward {ten.rows[0]['reward/mean']:.2f} at step 1, right engine {right.rows[0]['reward/mean']:.2f}",
            "Supported: nothing of the fault is in the rewards.",
        ],
        [
            "the sampling block is innocent",
            f"reported as drawn and scored with the temperature only: {whole.mean:+.3f} nats a token; reported raw: "
            f"{raw.mean:+.3f}",
            f"Not shown by the ratios: over {TOKENS} tokens the block alone would make {math.exp(TOKENS * whole.mean):.0e} "
            f"(as drawn) or {math.exp(TOKENS * raw.mean):.0e} (raw) on this model. That two other models trained under it "
            "speaks for it, if their ratios were near 1; the report does not give them.",
        ],
        [
            "`completions/clipped_ratio` 1.0 with a stop string",
            f"truncated: {story.clipped:.1%}",
            "Supported: a stop string is a normal end. Here it is counted as one.",
        ],
    ]


def _norms(told: Told) -> str:
    return ", ".join(f"{row['optimizer/grad_norm']:.1g}" for row in told.rows)


def _median(told: Told) -> float:
    return math.exp(float(np.median(told.log_ratios)))


def page(story: Story) -> str:
    def one(engine: str, correction: str) -> Told:
        return next(t for t in story.told if (t.variant.engine, t.variant.correction) == (engine, correction))

    right, low, ten = (one(engine, "sequence_mask") for engine in ("right", LOW, TENFOLD))
    long, cut, fixed = one(LONG, "sequence_mask"), one(LONG, "token_truncate, cap 10"), one("right", "none")
    rollout, sampled = story.config.rollout, story.config.sampling
    tokens = right.mean("rollout/length_mean")
    return f"""# The zero loss, replayed

Made by `python -m benchmarks.materials_failure`. The report this run follows trained a small model to propose changes to
materials, with rewards from physics. Every completion parsed, rewards varied, and the loss was 0.0 at every step: engine
and trainer disagreed by {REPORTED_GAP} nats a token. Here the [materials task](materials.md) fails in the same way, and is mended.

Each variant trains {len(right.rows)} steps of `recipes/materials.toml` on the fine-tuned SmolLM2-135M, in float32 at a rate of 5e-6, with {rollout.groups_per_step} groups of {rollout.group_size}
completions of up to {sampled.max_tokens} tokens ({tokens:.0f} in the mean), the same prompts and seed, and the sampling block of the report:
temperature {sampled.temperature}, top_p {sampled.top_p}, top_k {sampled.top_k}, repetition penalty {sampled.repetition_penalty}, a stop string that is kept, stop tokens.

- **right**: the hf engine, whose logprobs are those of the distribution it drew from.
- **{LOW}**, **{HIGH}**: it draws rightly, and each logprob that it reports is off by a normal number
  with mean ±{GAP} and standard deviation {SPREAD}: a mean absolute gap of {REPORTED_GAP}, as reported. *Tenfold*: with ten times the
  mean and variance, which over the {tokens:.0f} tokens here makes what the report had over {TOKENS}.
- **{LONG}**: the model is written as a LongRoPE one whose short factors are 1, so it is the same
  model. An engine that picks the factors by the longest sequence it may ever see takes the long ones, all {LONG_FACTOR:g}. It
  samples from another distribution than is trained, and reports it faithfully.

`sequence_mask` has an upper bound of {CAP:g} on pi_old / mu over a completion and no lower one, as in TRL.

## Engine and trainer disagree

![Sequence ratios]({NAME}-ratios.svg)

A gap of {low.mean("importance/log_ratio_abs_mean"):.2f} nats looks small. Over the {tokens:.0f} tokens of a completion it makes a ratio of {_median(low):.0e}; over the {TOKENS} tokens
of the report the same gap makes {math.exp(-GAP * TOKENS):.0e}. An engine that samples from another distribution always shows this sign in
the mean: the mean of log pi_old - log mu over its own tokens is minus a KL divergence ({long.mean("importance/log_ratio_mean"):+.3f} here).

## Where the signal went

![Ledger]({NAME}-ledger.svg)

![Loss and gradient norm]({NAME}-steps.svg)

{measured(story.told)}

The gap is log pi_old - log mu in nats per token. *Masked*, *shrunk* and *reached* are shares of the signal in the ledger, means
over the steps. *Weights moved by* is the norm of the update over that of the weights.

Under `sequence_mask` {low.mean("ledger/reached_share"):.2%} of the signal arrives from the engine that {LOW}, {ten.mean("ledger/reached_share"):.1g} of it
tenfold, {long.mean("ledger/reached_share"):.2%} from the one that {LONG}, and {right.mean("ledger/reached_share"):.1%} from the right one. `token_truncate` with a cap of {WIDE_CAP:g} lets
{cut.mean("ledger/reached_share"):.0%} of the LongRoPE engine's through. The true fix is an engine that is right: it needs no correction
(reached {fixed.mean("ledger/reached_share"):.0%}, gradient norm {fixed.mean("optimizer/grad_norm"):.2g}).

## What finds it

Before the first step, the preflight refuses to train (it was told to go on):

{refusals(story.told)}

After the fact, from the ordinary log (what follows from a finding is named after it) and the black box of step 1:

{found(story.told)}

On nothing but the {len(REPORTED)} rows of the report's own table, as a TRL log, `leadline doctor` says `{story.reported[0]}`:
{story.reported[1]}

## What the sampling block alone would do

The completions of step 1 of the right engine, scored by the model that drew them. *The whole block* is the distribution
they were drawn from; this is what vLLM calls processed logprobs, and what this trainer scores. TRL's trainer applies the
temperature only.

{sampling(story.readings)}

## The report, point by point

{compared(story, one)}
"""
