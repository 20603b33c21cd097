from pathlib import Path

from leadline.doctor.document import pages, write
from leadline.doctor.rules import RULES

DOCS = Path(__file__).parents[2] / "docs" / "rules"


def test_the_pages_in_docs_are_those_of_the_docstrings() -> None:
    on_disk = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    assert on_disk == pages(), "run `python -m leadline.doctor.document`"


def test_a_page_explains_what_the_rule_needs() -> None:
    page = pages()["zero-reward-variance-within-group.md"]
    assert page.startswith("# LL101 zero-reward-variance-within-group\n")
    assert "- `rollout/zero_signal_fraction`: share of groups without any nonzero advantage" in page


def test_the_index_links_every_rule() -> None:
    assert all(f"({rule.name}.md)" in pages()["index.md"] for rule in RULES)


def test_writing_removes_the_page_of_a_rule_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "no-such-rule.md").write_text("old")
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(pages())
