import io
import math
import xml.etree.ElementTree
from collections.abc import Iterator

import pytest
from rich.console import Console

from leadline.config import parse_config
from leadline.doctor.rule import Finding
from leadline.screen import Screen

CONFIG = parse_config(
    {
        "model": {"name": "models/SmolLM2"},
        "data": {"source": "rows.jsonl"},
        "rewards": [{"name": "exact_match"}],
        "run": {"steps": 100},
    }
)
ROW = {
    "reward/mean": 0.412,
    "reward/std": 0.31,
    "reward/group_std": 0.21,
    "ledger/sampled_tokens": 1520,
    "ledger/reached_tokens": 1482,
    "ledger/reached_share": 0.971,
    "ledger/clipped_share": 0.025,
    "ledger/stale_share": 0.004,
    "importance/ratio_mean": 1.002,
    "importance/ratio_min": 0.71,
    "importance/ratio_max": 1.42,
    "importance/kl_k3": 3.1e-4,
    "importance/ess": 0.98,
    "policy/entropy": 1.31,
    "optimizer/grad_norm": 0.84,
    "optimizer/learning_rate": 2e-6,
    "rollout/length_mean": 23,
    "rollout/length_min": 4,
    "rollout/length_max": 64,
    "rollout/truncated_fraction": 0.031,
    "time/wait_for_rollouts_s": 1.9,
    "time/update_s": 1.0,
}


def finding(rule: str = "LL302", severity: str = "error", step: int = 12) -> Finding:
    return Finding(rule, f"name-of-{rule}", severity, f"Title of {rule}.", "What happened.", "Do `this`.", (), step)  # type: ignore[arg-type]


def ticking(seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += seconds


def plain(seconds: float = 0.0) -> Screen:
    ticks = ticking(seconds)
    return Screen(CONFIG, console=Console(file=io.StringIO(), width=80), clock=lambda: next(ticks))


def live(width: int = 100, height: int = 30) -> Screen:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, _environ={"TERM": "xterm"})
    return Screen(CONFIG, console=console, clock=lambda: 0.0)


def lines(screen: Screen) -> list[str]:
    file = screen.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def drawn(screen: Screen, width: int = 100, height: int = 30) -> str:
    """The live screen as text."""
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(screen._render(console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- lines


def test_without_a_terminal_each_step_is_one_line() -> None:
    with plain(seconds=3.1) as screen:
        screen.show({"step": 12, **ROW}, [])
    assert lines(screen) == [
        "step 12/100  reward 0.412 ±0.31  reached 97 %  ratio 1.002  entropy 1.31  len 23  grad 0.84  3.1s"
    ]


def test_a_line_leaves_out_what_was_not_measured_and_says_what_is_undefined() -> None:
    with plain() as screen:
        screen.show({"step": 1, "reward/mean": math.nan, "kl/k3": 0.5}, [])
    assert lines(screen) == ["step 1/100  reward n/a  kl 0.5  0ms"]


def test_an_evaluation_has_a_line_without_a_time() -> None:
    with plain() as screen:
        screen.show({"step": 0, "eval/reward_mean": 0.142}, [])
    assert lines(screen) == ["step 0/100  held-out 0.142"]


def test_a_finding_is_printed_when_it_appears_and_when_it_comes_back() -> None:
    with plain() as screen:
        for step, findings in enumerate([[], [finding()], [finding()], [], [finding()]], start=1):
            screen.show({"step": step}, findings)
    marks = ["error" if line.startswith("error") else line for line in lines(screen)]
    assert marks == ["step 1/100", "step 2/100", "error", "step 3/100", "step 4/100", "step 5/100", "error"]
    assert lines(screen)[2] == "error LL302 name-of-LL302: What happened. Fix: Do `this`."


def test_messages_are_printed_as_they_are() -> None:
    with plain() as screen:
        screen.stage("generate")
        screen.message("kept [bold]all[/bold] of it " + "x" * 100)
    assert lines(screen) == ["kept [bold]all[/bold] of it " + "x" * 100]


# --- live


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (60, 50), (200, 60)])
def test_the_screen_fits_its_width_and_cuts_no_number(width: int, height: int) -> None:
    screen = live(width)
    screen.show({"step": 12, **ROW}, [])
    text = drawn(screen, width, height)
    assert all(len(line) <= width for line in text.splitlines())
    for shown in ("step 12/100", "0.412 ± 0.31", "97 % reached", "1,482/1,520 tokens", "1.002 0.71 … 1.42", "ESS 98 %"):
        assert shown in text
    for shown in ("1.31", "0.84", "2.0e-06", "4 … 64 tokens", "3.1 %", "rollouts", "1.9s", "no rule fires", "±"):
        assert shown in text
    assert "…" not in text.replace("0.71 … 1.42", "").replace("4 … 64", "").replace("– … –", "")


WAITING = {
    "time/step_s": 3.1,
    "time/wait_for_trainer_s": 0.2,
    "time/overlap_share": 0.35,
    "time/generate_s": 1.5,
    "time/reward_s": 0.1,
    "staleness/max": 2.0,
}


def of_age(age: str, tokens: float) -> dict[str, float]:
    values = {"tokens": tokens, "log_ratio_abs_mean": 0.003, "ess": 0.89, "weight_mean": 1.002}
    return {f"staleness/{age}/{name}": value for name, value in values.items()}


@pytest.mark.parametrize(("width", "height"), [(100, 34), (80, 30), (60, 56)])
def test_a_run_ahead_shows_who_waits_and_how_tokens_of_each_age_fare(width: int, height: int) -> None:
    screen = live(width, height)
    screen.show({"step": 12, **ROW, **WAITING, **of_age("age_0", 320), **of_age("age_1", 1200)}, [])
    text = drawn(screen, width, height)
    assert "trainer waits     61 % on generation" in text
    assert "tokens by age · overlap 35 % of the step" in text
    assert "age 1  1,200 tokens  |Δ| 0.003  ESS 89 %  weight 1.002" in text
    assert "no rule fires" in text, "there is room for the findings"


def test_of_many_ages_the_youngest_and_the_oldest_are_shown() -> None:
    screen = live()
    ages = [f"age_{age}" for age in range(8)] + ["age_8_or_more"]
    screen.show({"step": 12, **ROW, **{k: v for age in ages for k, v in of_age(age, 5).items()}}, [])
    text = drawn(screen)
    assert [line.split("  ")[0].strip("│ ") for line in text.splitlines() if "│ age" in line] == [
        "age 0",
        "age 1",
        "age 2",
        "age 8 or more",
    ]


def test_a_synchronous_run_has_no_panel_of_ages() -> None:
    screen = live()
    screen.show({"step": 12, **ROW, **WAITING}, [])
    assert "tokens by age" not in drawn(screen)


def test_a_line_says_who_waited_in_the_last_steps() -> None:
    with plain() as screen:
        for step in range(1, 30):
            waited = {"time/step_s": 4.0, "time/wait_for_rollouts_s": 3.0 if step <= 15 else 0.0}
            screen.show({"step": step, "reward/mean": 0.5, "time/generate_s": 1.0, **waited}, [])
    said = lines(screen)
    assert said[0] == "step 1/100  reward 0.5  4.0s  trainer waited 75 % for generation"
    assert said[19] == "step 20/100  reward 0.5  4.0s  trainer waited 38 % for generation"
    assert said[-1] == "step 29/100  reward 0.5  4.0s"


def test_a_healthy_screen_fits_a_terminal_of_thirty_lines() -> None:
    screen = live()
    screen.show({"step": 12, **ROW}, [])
    assert len(drawn(screen).splitlines()) <= 30


def test_the_legend_names_the_stages_above_half_a_percent() -> None:
    screen = live()
    screen.show({"step": 12, **ROW}, [])
    text = drawn(screen)
    assert "■ clipped 2.5 %" in text
    assert "stale 0" not in text


def test_nan_reads_not_available_and_missing_is_a_dash() -> None:
    screen = live()
    screen.show({"step": 1, "reward/mean": 0.5, "kl/k3": math.nan}, [])
    text = drawn(screen)
    assert "KL to ref          n/a" in text
    assert "KL to old            –" in text


def test_a_step_without_signal_says_so() -> None:
    screen = live()
    screen.show({"step": 1, "reward/mean": 0.0, "ledger/reached_share": math.nan}, [])
    assert "no group carries a signal" in drawn(screen)


def test_the_screen_can_be_drawn_before_the_first_step() -> None:
    assert "step 0/100" in drawn(live())


def test_an_evaluation_row_keeps_the_last_step_on_the_screen() -> None:
    screen = live()
    screen.show({"step": 0, "eval/reward_mean": 0.142}, [])
    screen.show({"step": 12, **ROW}, [])
    screen.show({"step": 12, "eval/reward_mean": 0.551}, [])
    text = drawn(screen)
    assert "held-out 0.142 → 0.551" in text
    assert "0.412 ± 0.31" in text


def test_the_time_left_follows_the_last_steps() -> None:
    screen = live()
    for step in range(1, 41):
        screen.show({"step": step, **ROW, "time/step_s": 100.0 if step <= 20 else 2.0}, [])
    assert "2.0s/step, 2m 00s left" in drawn(screen)


def test_a_resumed_run_shows_its_past() -> None:
    rows = [{"step": 0, "eval/reward_mean": 0.1}, *({"step": step, "reward/mean": step / 10} for step in range(1, 9))]
    screen = Screen(CONFIG, console=Console(file=io.StringIO()), rows=rows)
    assert screen.view.curve == [step / 10 for step in range(1, 9)]
    text = drawn(screen)
    assert "step 8/100" in text and "held-out 0.1" in text
    assert "–/step, – left" in text


def test_the_worst_finding_comes_first_in_full_and_the_others_by_title() -> None:
    screen = live()
    screen.show({"step": 12, **ROW}, [finding("LL101", "warning"), finding("LL302"), finding("LL403")])
    text = drawn(screen)
    assert text.index("LL302 Title") < text.index("What happened.") < text.index("→ Do this.") < text.index("LL403")
    assert text.index("LL403") < text.index("LL101 Title of LL101.")
    assert text.count("What happened.") == 1


def test_a_long_finding_is_cut_and_says_where_the_rest_is() -> None:
    screen = live()
    long = Finding("LL302", "name", "error", "Title.", "word " * 200, "fix " * 200, (), 12)
    screen.show({"step": 12, **ROW}, [long])
    text = drawn(screen)
    assert "findings.jsonl has the rest" in text
    assert len(text.splitlines()) <= 30


def test_a_finding_stays_dimmed_for_ten_steps_after_it_held() -> None:
    screen = live()
    screen.show({"step": 1, **ROW}, [finding(step=1)])
    assert "(step 1)" not in drawn(screen)
    for step in range(2, 11):
        screen.show({"step": step, **ROW}, [])
        assert "Title of LL302.  (step 1)" in drawn(screen)
    screen.show({"step": 11, **ROW}, [])
    assert "LL302" not in drawn(screen)


def test_a_terminal_is_drawn_on_while_the_run_lasts() -> None:
    screen = live()
    with screen:
        screen.stage("generate")
        screen.show({"step": 12, **ROW}, [])
        screen.message("a line above")
    text = "\n".join(lines(screen))
    assert "generate" in text and "a line above" in text and "where the signal went" in text
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_the_terminal_is_given_back_when_the_run_fails() -> None:
    screen = live()
    with pytest.raises(ZeroDivisionError), screen:
        raise ZeroDivisionError
    assert "\x1b[?25h" in "\n".join(lines(screen))


def test_a_dumb_terminal_gets_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with Screen(CONFIG, console=console) as screen:
        screen.show({"step": 1}, [])
    assert lines(screen) == ["step 1/100"]


def test_the_picture_is_an_svg_of_the_screen() -> None:
    screen = live()
    screen.show({"step": 12, **ROW}, [finding()])
    picture = screen.svg()
    root = xml.etree.ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert "url(http" not in picture and "@font-face" not in picture
    words = "".join(root.itertext()).replace("\xa0", " ")
    assert "where the signal went" in words and "Title of LL302." in words
    assert lines(screen) == [], "the picture is not printed"
