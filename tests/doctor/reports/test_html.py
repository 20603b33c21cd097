import re
from html.parser import HTMLParser

from leadline.doctor.reports import render
from tests.doctor.reports.example import HEALTHY, SICK, UNDECIDED


class Balance(HTMLParser):
    """Fails on a tag that is closed and was not opened, or the other way around."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass


def test_every_tag_is_closed() -> None:
    for runs in ([SICK], [HEALTHY], [UNDECIDED], [SICK, HEALTHY]):
        page = Balance()
        page.feed(render(runs, "html"))
        assert page.open == []


def test_nothing_is_fetched_and_no_script_runs() -> None:
    page = render([SICK], "html")
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(|<link|<script""", page)
    assert "&lt;script&gt;alert" in page


def test_it_suits_light_and_dark() -> None:
    assert "@media (prefers-color-scheme: dark)" in render([SICK], "html")


def test_each_finding_stands_beside_its_curves_with_its_number_at_the_onset() -> None:
    page = render([SICK], "html")
    first, second = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert re.findall(r'aria-label="([^"]*)"', first) == [
        "importance/weight_mean by step",
        "optimizer/grad_norm by step",
    ]
    assert first.count('<text class="mark error"') == 2
    assert "<svg" not in second  # it has no evidence that is a curve
    assert "alone" in second.split(">")[0]


def test_the_run_has_a_panel_for_each_thing_that_was_logged_and_the_ledger_is_stacked() -> None:
    page = render([SICK], "html")
    titles = re.findall(r'<figure class="card">\s*<figcaption[^>]*><b>([^<]*)</b>', page)
    assert titles == [
        "reward",
        "loss",
        "gradient norm",
        "importance ratio, trainer / engine",
        "importance weight, as applied",
    ]
    assert set(re.findall(r'<polygon class="stage ([a-z_]+)"', page)) == {"reached", "importance_masked", "no_signal"}
    assert "importance masked 70 %" in page


def test_a_value_that_is_not_finite_is_marked() -> None:
    assert "not finite at step 101" in render([SICK], "html")


def test_several_runs_have_a_way_to_each() -> None:
    page = render([SICK, HEALTHY], "html")
    assert '<a href="#run-2">runs/two: Nothing wrong found</a>' in page
    assert '<section id="run-2">' in page
