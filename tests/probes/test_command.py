"""`leadline probe` as it is typed: what it prints, its JSON, its exit codes, and its errors."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from leadline.cli import app
from leadline.errors import ConfigError, DataError, EngineError, LogError, ModelError
from leadline.probes.engine.causes import CAUSES
from leadline.probes.engine.probe import Asked, probe_engine, probe_file
from leadline.probes.engine.report import print_report
from tests.probes.engine.architectures import architecture, holding, moved, saved
from tests.probes.engine.test_files import black_box

SMALL = ["--model", "tiny", "--completions", "6", "--tokens", "16"]


def typed(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["probe", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def as_json(*words: str | Path) -> tuple[int, Any]:
    code, output = typed("engine", *words, "--json")
    return code, json.loads(output)


def test_a_right_engine_exits_with_0_and_says_how_small_the_gap_is() -> None:
    code, output = typed("engine", *SMALL)
    assert code == 0
    assert "noise" in output and "6 completions" in output and "Not checked" in output


def test_json_holds_the_verdict_the_measures_and_the_three_numbers() -> None:
    code, found = as_json(*SMALL)
    assert code == 0 == found["exit_code"]
    assert found["verdict"] == "noise"
    assert found["engine"]["gap"]["completions"] == 6
    assert found["engine"]["shares"]["bug"] == 0
    assert len(found["engine"]["gap"]["corrections"]) == 6


def test_a_served_dtype_that_is_not_the_trainers_is_found_unless_it_is_said(tmp_path: Path) -> None:
    code, found = as_json(*SMALL, "--dtype", "bfloat16")
    assert (code, found["verdict"]) == (0, "noise")
    assert found["engine"]["trained"]["tokens"] == found["engine"]["gap"]["tokens"]


def test_old_weights_are_named_when_the_probe_is_told_of_them(tmp_path: Path) -> None:
    new, old = saved(architecture("llama"), tmp_path / "new"), tmp_path / "old"
    loaded = architecture("llama")
    object.__setattr__(loaded, "model", holding(loaded, moved(loaded, 1)))
    saved(loaded, old)
    path = tmp_path / "drawn.jsonl"
    _write_nemo(path, loaded)
    code, found = as_json("--from", path, "--model", new, "--older", old)
    assert (code, found["verdict"]) == (1, "stale_weights")
    assert str(old) in found["engine"]["verdict"]["detail"]
    assert found["engine"]["shares"]["staleness"] > 0.1


def _write_nemo(path: Path, loaded: Any) -> None:
    from tests.probes.engine.induced import Seam, drawn_across

    drawn = drawn_across(Seam(loaded))
    rows, ends = [], drawn.lengths.cumsum(0).tolist()
    for prompt, completion, end in zip(drawn.prompts, drawn.completions, ends, strict=True):
        engine = drawn.engine[end - len(completion) : end].tolist()
        rows.append(
            {
                "token_ids": [*prompt, *completion],
                "token_loss_mask": [0] * len(prompt) + [1] * len(completion),
                "generation_logprobs": [0.0] * len(prompt) + engine,
            }
        )
    path.write_text("\n".join(map(json.dumps, rows)))


def test_a_black_box_with_its_policy_says_which_column_is_off(tmp_path: Path) -> None:
    black_box(tmp_path / "run")  # the engine's logprobs are 0.25 nats too low
    box = tmp_path / "run/blackbox/step_000001.safetensors"
    report = probe_file(box, Asked(model="tiny"))
    assert report.recorded is not None
    assert report.recorded.verdict.cause == "noise"  # before the update the policy was `tiny` of seed 0
    assert report.attribution.gap.mean == pytest.approx(0.25, abs=1e-4)
    assert report.exit_code == 1


def test_a_black_box_alone_is_examined_by_its_numbers_and_says_so(tmp_path: Path) -> None:
    black_box(tmp_path / "run")
    code, output = typed("engine", "--from", tmp_path / "run")
    assert code == 1
    assert "give --model" in output


def test_an_adapter_that_the_engine_lacks_is_named(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from leadline.models import load_model
    from leadline.settings.model import Model

    tuned = load_model(Model(name="tiny", lora_rank=2, device="cpu"))
    for name, parameter in tuned.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    tuned.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    _write_nemo(tmp_path / "base.jsonl", load_model(Model(name="tiny", device="cpu")))
    code, found = as_json("--from", tmp_path / "base.jsonl", "--model", "tiny", "--adapter", tmp_path / "adapter")
    assert (code, found["verdict"]) == (1, "adapter_missing")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, "--model is missing, but"),
        ({"model": "tiny", "engine": "sglang"}, ConfigError, "neither hf, vllm nor an address"),
        ({"model": "tiny", "engine": "http://127.0.0.1:9"}, EngineError, "no vLLM server is well there"),
        ({"model": "tiny", "dtype": "fp8"}, ConfigError, "--dtype is 'fp8', but the dtypes are"),
        ({"model": "/nowhere"}, ModelError, "/nowhere"),
        ({"model": "tiny", "prompts": Path("/nowhere.txt")}, DataError, "--prompts is '/nowhere.txt', but"),
        ({"model": "tiny", "adapter": Path("/nowhere")}, ModelError, "--adapter is '/nowhere', but peft"),
        ({"model": "tiny", "recipe": Path("/nowhere.toml")}, ConfigError, "The recipe is '/nowhere.toml'"),
    ],
)
def test_what_cannot_be_probed_is_said_with_what_to_do(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        probe_engine(Asked(**options))


def test_a_table_without_tokens_cannot_be_scored_by_a_model(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("completion,position,engine_logprob,trainer_logprob\n0,0,-1,-1\n")
    with pytest.raises(LogError, match="does not say which prompts"):
        probe_file(path, Asked(model="tiny"))


def test_a_column_that_is_missing_needs_a_model(tmp_path: Path) -> None:
    _write_nemo(path := tmp_path / "a.jsonl", architecture("llama"))
    with pytest.raises(LogError, match="no logprobs of the trainer"):
        probe_file(path, Asked())


def test_the_report_fits_a_narrow_screen() -> None:
    console = Console(width=80, record=True, file=io.StringIO(), highlight=False)
    print_report(probe_engine(Asked(model="tiny", completions=4, tokens=12)), console)
    assert max(len(line) for line in console.export_text().splitlines()) <= 80


def test_the_help_needs_neither_torch_nor_a_model() -> None:
    code = "import sys, leadline.probes.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert typed("engine", "--help")[0] == 0


def test_the_documented_causes_are_those_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs/probes.md").read_text()
    assert [cause.name for cause in CAUSES if f"`{cause.name}`" not in text] == []


def test_the_side_that_is_off_is_said(tmp_path: Path) -> None:
    black_box(tmp_path / "run")
    _, output = typed("engine", "--from", tmp_path / "run", "--model", "tiny")
    assert "what is off is the engine's side" in " ".join(output.split())
