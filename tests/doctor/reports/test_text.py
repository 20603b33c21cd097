import io
from dataclasses import replace

from rich.console import Console

from leadline.doctor.reports import as_text
from leadline.doctor.reports.examined import Examined
from leadline.doctor.reports.text import print_reports
from tests.doctor.reports.example import HEALTHY, SICK, UNDECIDED


def test_no_line_is_wider_than_80_columns() -> None:
    assert max(map(len, as_text([SICK], width=80).splitlines())) <= 80


def test_everything_that_the_report_says_is_in_the_text() -> None:
    text = " ".join(as_text([SICK], width=80).split())
    for words in (
        "Something is wrong. The importance correction",
        "since step 60 (and 1 more finding)",
        "error · near certain · since step 60 · LL302 importance-correction-erases-signal",
        "The gradient norm fell to 0.005.",
        "The reward still rises.",
        "dead-update (likely)",
        "no-update-grad-and-kl-exactly-zero",
        '`vllm_importance_sampling_mode = "token_truncate"`',
        "Do not mask truncated completions.",
        "Run one batch without the correction.",
        "»importance weight 1e-8« × tokens kept 0.4 to 1 × clip pass ?",
        "The update dies at the importance weight (from importance/weight_mean).",
        "All rewards are equal: 80 % of groups vary.",
        "A negative loss is normal.",
        "first-update-identity-broken: not logged: `policy/first_ratio_error`. Use it",
        "Two rows were logged twice.",
    ):
        assert words in text, words


def test_markup_in_a_log_is_printed_as_it_is() -> None:
    assert "[red]bold[/red]" in as_text([SICK], width=200)


def test_the_curve_of_the_first_evidence_shows_the_fall() -> None:
    line = next(line for line in as_text([SICK], width=100).splitlines() if line.strip().startswith("curve"))
    assert "██▁▁" in line
    assert "importance/weight_mean, 1 to 1e-8" in line


def test_a_terminal_gets_colour_and_a_file_none() -> None:
    colored = io.StringIO()
    print_reports([SICK], Console(file=colored, force_terminal=True, color_system="standard", width=80))
    assert "\x1b[" in colored.getvalue()
    assert "\x1b[" not in as_text([SICK])


def test_a_healthy_run_and_an_undecided_one_say_so_in_their_first_lines() -> None:
    assert "✓ Nothing wrong found." in as_text([HEALTHY])
    undecided = as_text([UNDECIDED])
    assert "? Could not decide. 1 check broke." in undecided
    assert "settings only" in undecided
    assert "ZeroDivisionError: x" in undecided


def test_a_log_cannot_steer_the_terminal() -> None:
    hostile = replace(SICK.report, notes=("\x1b]0;owned\x07 \x9b2J",), source="a\x1b[2Jb")
    text = as_text([Examined(SICK.run, hostile)])
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "]0;owned" in text
