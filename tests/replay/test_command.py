"""`leadline replay`, and the sentence that it lends to `leadline doctor`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import leadline
from tests.replay.runs import LOST, trained


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("lost") / "run", **LOST)


def replayed(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    code, text = leadline(tmp_path / "output.txt", "replay", *arguments)
    return code, " ".join(text.split())


def test_the_report_says_that_it_agrees_what_changes_would_do_and_which_one_restores_the_signal(
    lost: Path, tmp_path: Path
) -> None:
    code, text = replayed(tmp_path, str(lost))
    assert code == 0, text
    assert text.count("are the recorded ones to the last digit") == 2
    assert "as recorded" in text and "sequence_truncate" in text and "importance masked" in text
    assert 'with objective.importance_action = "token_truncate" it would have been' in text


def test_one_change_alone_is_replayed_on_demand(lost: Path, tmp_path: Path) -> None:
    code, text = replayed(tmp_path, str(lost), "--step", "4", "--set", "objective.importance_action=off")
    assert code == 0 and "step 4 of" in text
    assert "no correction" in text and "token_mask" not in text


def test_json_has_the_same(lost: Path, tmp_path: Path) -> None:
    _, text = leadline(tmp_path / "output.txt", "replay", str(lost), "--json")
    values: dict[str, Any] = json.loads(text.splitlines()[-1])
    assert values["agrees"] and values["step"] == 5
    assert values["restores_the_signal"] == {"objective.importance_action": "token_truncate"}
    assert values["weights"].endswith("step_000004")
    by_action = {c["settings"].get("objective.importance_action"): c for c in values["changes"]}
    assert by_action["off"]["metrics"]["ledger/reached_share"] > 0.9
    assert by_action["off"]["gradient_by_weights"] > values["recorded"]["gradient_by_weights"]


def test_a_record_that_does_not_fit_its_black_box_makes_the_exit_code_1(lost: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "run"
    shutil.copytree(lost, other)
    text = (other / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    rows[-1]["loss"] = rows[-1]["loss"] + 1.0
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = replayed(tmp_path, str(other), "--set", "objective.importance_action=off")
    assert code == 1 and "DIFFER from the record" in text and "loss:" in text


BAD: dict[str, tuple[list[str], str]] = {
    "a step that is gone": (["--step", "1"], "--step is 1, but '{run}' keeps black boxes of the steps 3, 4, 5 only"),
    "no run": (["{run}/nothing"], "but there is no config.json of a run"),
    "a setting that was sampled": (["--set", "rollout.group_size=4"], "a replay has the rollouts and rewards"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_replayed_is_a_clear_error(
    arguments: list[str], message: str, lost: Path, tmp_path: Path
) -> None:
    words = [word.replace("{run}", str(lost)) for word in arguments]
    if not words[0].startswith("/"):
        words = [str(lost), *words]
    code, text = replayed(tmp_path, *words)
    assert code == 2 and message.replace("{run}", str(lost)) in text and "Traceback" not in text


def test_the_doctor_shows_the_change_that_restores_the_signal(lost: Path, tmp_path: Path) -> None:
    _, text = leadline(tmp_path / "output.txt", "doctor", str(lost))
    assert "Replayed step 5: " in text
    assert 'with objective.importance_action = "token_truncate" it would have been' in text


def test_the_doctor_does_not_speak_of_a_replay_where_the_report_is_for_a_program(lost: Path, tmp_path: Path) -> None:
    _, text = leadline(tmp_path / "output.txt", "doctor", str(lost), "--format", "json")
    assert "Replayed" not in text and json.loads(text)
