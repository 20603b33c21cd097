"""The installed TRL against the equations, and the page that says so."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leadline.probes.command import probe
from leadline.probes.trainer import conform
from leadline.probes.trainer.conform import trl_conformance
from leadline.probes.trainer.page import to_markdown

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's advice about settings is about runs

PAGE = Path(__file__).parents[3] / "docs/trl-conformance.md"


@pytest.fixture(scope="module")
def result():
    return trl_conformance()


def test_what_departs_is_what_the_settings_say(result):
    assert {row.setting for row in result.departures} == {
        "cispo, epsilon_high=0.28",
        "dapo, beta=0.04",
        "gspo, beta=0.04",
        "bnpo in two micro-batches",
    }
    assert all("times the policy ratio" in row.verdict for row in result.departures if "beta" in row.setting)


def test_what_conforms_does_so_to_rounding(result):
    rows = [row for row in result.rows if row.conforms]
    assert len(rows) >= 20
    assert max(row.gradient_difference for row in rows) < 1e-12
    assert max(row.value_difference for row in rows if row.part != "advantages") < 1e-12


def test_the_page_is_the_one_in_the_documentation(result):
    """Loosely: another TRL may differ in numbers, the same one not in what it says."""
    page = PAGE.read_text()
    if f"TRL {version('trl')} " not in page:
        pytest.skip("written for another version")
    words = [line.split("|")[1:4] for line in to_markdown(result).splitlines() if line.startswith("| ")]
    assert words == [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")]


def test_the_command_prints_the_table_and_exits_with_what_it_found(result, monkeypatch, tmp_path):
    monkeypatch.setattr(conform, "trl_conformance", lambda: result)
    plain = CliRunner().invoke(probe, ["trainer", "trl", "--output", str(tmp_path / "page.md")])
    assert plain.exit_code == 1
    assert f"✗ TRL {version('trl')}:" in plain.stdout
    assert (tmp_path / "page.md").read_text() == to_markdown(result)
    assert len(json.loads(CliRunner().invoke(probe, ["trainer", "trl", "--json"]).stdout)["rows"]) == len(result.rows)
