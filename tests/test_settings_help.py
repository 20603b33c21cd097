from pathlib import Path

import pytest

from leadline.config import SECTIONS
from leadline.rewards import REWARDS
from leadline.settings.sft import Sft
from leadline.settings_help import settings_help, settings_markdown

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
SETTINGS = [(name, field) for name, section in SECTIONS.items() for field in section.model_fields]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, settings_help(width).splitlines())) <= width


@pytest.mark.parametrize(("section", "field"), SETTINGS)
def test_each_setting_has_a_line_with_default_and_type_and_its_meaning_below(section: str, field: str) -> None:
    header = "[[rewards]]" if section == "rewards" else f"[{section}]"
    lines = settings_help(100).split(f"\n{header}  " if section != "model" else f"{header}  ", 1)[1].splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"  {field} = "))
    assert "   # " in lines[place]
    meaning = " ".join((SECTIONS[section].model_fields[field].description or "").split())
    below = ""
    for line in lines[place + 1 :]:
        if not line.startswith("      "):
            break
        below += f" {line.strip()}"
    assert below.strip().endswith(meaning)


def test_a_line_reads_like_a_recipe() -> None:
    lines = settings_help(100).splitlines()
    assert "  name = (required)   # string" in lines
    assert "  lora_targets = []   # list of string" in lines
    assert "  importance_high = 2.0   # number" in lines
    assert '  kl_estimator = "k3"   # k1 or k2 or k3' in lines
    assert "  eval_source = none   # string" in lines


def test_the_built_in_rewards_are_listed() -> None:
    assert all(name in settings_help().rsplit("Built-in rewards:", 1)[1] for name in REWARDS)
    assert all(f"\n- `{name}`: " in settings_markdown() for name in REWARDS)


def test_the_page_is_generated_from_the_settings_as_they_are() -> None:
    assert PAGE.read_text() == settings_markdown(), "run `make docs`"


def test_each_setting_has_one_row_of_the_page() -> None:
    rows = [line for line in settings_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(SETTINGS) + len(Sft.model_fields)
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
