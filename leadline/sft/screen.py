"""The face of a fine-tuning run: its loss, its held-out loss, the optimizer and the time."""

from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from leadline.numerals import duration, number
from leadline.panels import DIM, TOP_HEIGHT, Chart, View, beside, facts_grid, panel, progress, valued
from leadline.screen import Face
from leadline.sft.config import SftConfig

WORDS = {
    "loss {}": "loss",
    "entropy {}": "policy/entropy",
    "grad {}": "optimizer/grad_norm",
    "epoch {}": "data/epoch",
    "held-out loss {}": "eval/loss",
    "perplexity {}": "eval/perplexity",
    "held-out reward {}": "eval/reward_mean",
}


def sft_face(config: SftConfig) -> Face:
    """What the screen shows of a fine-tuning run."""
    heading = f"{Path(config.model.name).name} · {config.sft.demonstrations_per_step} demonstrations a step"
    return Face("leadline sft", heading, "loss", "eval/loss", WORDS, _draw)


def _draw(view: View, console: Console) -> RenderableType:
    return Group(progress(view), beside(_loss(view), _optimizer(view), console))


def _loss(view: View) -> Panel:
    """The loss of the last step and of the run, with the held-out ones."""
    now = Text.assemble((number(view.metrics.get("loss")), "bold"), (" nats per token", DIM))
    last = Text("held-out –", style=DIM)
    if view.held_out:
        path = " → ".join(number(value) for value in [view.held_out[0], *view.held_out[1:][-1:]])
        last = Text.assemble(("held-out ", DIM), path)
    return panel("loss", Group(now, Chart(view.curve, TOP_HEIGHT - 4), last), TOP_HEIGHT)


def _optimizer(view: View) -> Panel:
    """How far the last step went, and how fast."""
    m, grid = view.metrics, facts_grid()
    moved, discarded = number(m.get("optimizer/update_norm")), number(m.get("optimizer/discarded_steps"))
    grid.add_row("grad norm", valued(m, "optimizer/grad_norm"), f"moved {moved}, discarded {discarded}")
    grid.add_row("learning rate", valued(m, "optimizer/learning_rate"), "")
    grid.add_row("entropy", valued(m, "policy/entropy"), "nats")
    grid.add_row("tokens", valued(m, "policy/tokens"), "in the loss")
    grid.add_row("speed", valued(m, "throughput/trained_tokens_per_s"), "of them a second")
    grid.add_row("epoch", valued(m, "data/epoch"), f"{duration(m.get('time/step_s'))} the last step")
    return panel("optimizer and time", grid, TOP_HEIGHT)
