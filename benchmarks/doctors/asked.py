"""How each doctor is asked, and what it said."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Said:
    """A finding that counts, in its doctor's order."""

    name: str
    words: str = ""


RECORD = """
import json, sys, types
transformers = types.ModuleType("transformers")  # of which rlprobe's hook needs one class, to inherit nothing from
transformers.TrainerCallback = object
sys.modules["transformers"] = transformers
from rlprobe.integrations.trl import RlprobeCallback
from types import SimpleNamespace as Namespace
settings, *rows = [json.loads(line) for line in open(sys.argv[1])]
args = Namespace(to_dict=lambda: settings["config"], world_size=1, process_index=0)
hook = RlprobeCallback(sys.argv[2])
hook.on_train_begin(args, Namespace(global_step=0), None)
for row in rows:
    hook.on_log(args, Namespace(global_step=row.pop("step")), None, logs=row)
hook.on_train_end(args, Namespace(global_step=0), None)
"""
RLPROBE = "from rlprobe.cli import app; app()"
RLDOCTOR = "import sys; from rl_doctor.cli import main; sys.exit(main())"


def ask_leadline(log: Path) -> list[Said]:
    answer = _json([sys.executable, "-m", "leadline", "doctor", str(log), "--format", "json"])
    return [Said(finding["name"]) for finding in answer["findings"]]


def ask_rldoctor(python: str, log: Path) -> list[Said]:
    findings = _json([python, "-c", RLDOCTOR, "diagnose", str(log), "--format", "json"])["findings"]
    counted = [finding for finding in findings if finding["severity"] in ("WARNING", "CRITICAL")]
    return [Said(f["detector"], " ".join((f["title"], f["summary"], *f["prescription"][:1]))) for f in counted]


def ask_rlprobe(python: str, log: Path) -> list[Said]:
    recording = log.parent / "rlprobe"
    run_command([python, "-c", RECORD, str(log), str(recording)])
    answer = _json([python, "-c", RLPROBE, "doctor", str(recording), "--json"])
    findings = answer if isinstance(answer, list) else answer["findings"]
    counted = [finding for finding in findings if finding["severity"] in ("warn", "critical")]
    return [Said(f["signature_id"], " ".join((f["explanation"], *f["suggested_actions"][:1]))) for f in counted]


def run_command(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _json(command: Sequence[str]) -> Any:
    return json.loads(run_command(command))
