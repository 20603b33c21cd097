import markdown_it

from leadline.doctor.reports import render
from tests.doctor.reports.example import SICK


def test_it_is_markdown_with_a_heading_per_finding_and_the_budget_as_a_table() -> None:
    html = markdown_it.MarkdownIt().enable("table").render(render([SICK], "markdown"))
    assert html.count("<h3>") == 2
    assert "<h3>1. The importance correction takes most of the learning signal.</h3>" in html
    assert "<td><strong>1e-8</strong> (dead)</td>" in html
    assert "<li>The gradient norm fell to 0.005.</li>" in html


def test_what_could_not_be_checked_is_folded_away() -> None:
    text = render([SICK], "markdown")
    assert "<summary>1 check could not be made.</summary>" in text
    assert "- `first-update-identity-broken`: not logged: `policy/first_ratio_error`; Use it." in text
