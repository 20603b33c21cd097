"""What a person sees while a model is fine-tuned."""

import io
from pathlib import Path

from rich.console import Console

from leadline.screen import Screen
from leadline.sft.screen import sft_face
from tests.sft.runs import printed, sft_config, tuned

ROW = {
    "step": 3.0,
    "loss": 1.25,
    "policy/entropy": 0.9,
    "policy/tokens": 210.0,
    "optimizer/grad_norm": 2.5,
    "optimizer/update_norm": 1e-3,
    "optimizer/learning_rate": 2e-5,
    "optimizer/discarded_steps": 0.0,
    "data/epoch": 0.5,
    "throughput/trained_tokens_per_s": 1234.0,
    "time/step_s": 0.5,
}


def test_each_step_and_evaluation_is_a_line_where_there_is_no_terminal(tmp_path: Path) -> None:
    lines = printed(tuned(tmp_path / "run", run={"steps": 2})).splitlines()
    assert lines[0].startswith("step 0/2  held-out loss ") and "perplexity" in lines[0]
    assert lines[1].startswith("step 1/2  loss ") and "epoch 0.167" in lines[1] and "reward" not in lines[1]
    assert lines[3].startswith("step 2/2  held-out loss ")


def test_the_live_screen_shows_the_loss_its_course_and_the_held_out_loss() -> None:
    config = sft_config()
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    screen = Screen(config, face=sft_face(config), console=console, clock=lambda: 0.0)
    screen.restore([{"step": 0.0, "eval/loss": 3.5}, *({**ROW, "loss": 3.0 - i} for i in range(2)), ROW])
    with console.capture() as capture:
        console.print(screen.face.draw(screen.view, console))
    text = capture.get()
    assert "1.25 nats per token" in text and "held-out 3.5" in text
    assert "4 demonstrations a step" in text and "210" in text and "1,234" in text and "2.0e-05" in text
    assert max(map(len, text.splitlines())) <= 100


def test_an_unmeasured_value_is_a_dash() -> None:
    config = sft_config()
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    screen = Screen(config, face=sft_face(config), console=console, clock=lambda: 0.0)
    with console.capture() as capture:
        console.print(screen.face.draw(screen.view, console))
    assert "held-out –" in capture.get()
