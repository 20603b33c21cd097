"""The doctor inside TRL: `GRPOTrainer(..., callbacks=[DoctorCallback()])`."""

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import TrainerCallback

from leadline.doctor.examine import WINDOW, findings_since
from leadline.doctor.readers.configs import canonical_settings
from leadline.doctor.readers.recognise import named
from leadline.doctor.rule import Finding
from leadline.doctor.run_log import RunLog
from leadline.errors import ConfigError
from leadline.integrations.trl_files import Files
from leadline.integrations.trl_probe import Probe, trainer_calling
from leadline.integrations.trl_step import Flat, blackbox, flatten, measure, packed_blackbox, packed_metrics

__all__ = ["DoctorCallback"]

OnNonfinite = Literal["warn", "stop", "rollback"]
MAX_UNDONE = 5
"""Steps in a row that are undone before training stops: what does not pass goes on for ever."""
QUIET_ROWS = 20
"""A finding that has not held for so many rows begins anew."""
MOST_TIME = 0.01
"""Share of the time that goes into asking the rules: where steps are short, one look serves several of them."""
URGENT = ("loss", "reward/mean", "optimizer/grad_norm")
"""Where one of these is not finite, the rules are asked at once."""
TRL = named("trl")


class DoctorCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a TRL trainer live: names what goes wrong when it begins, and lets no step pass that is not finite.

    In TRL's GRPOTrainer (and trainers with its methods) every sampled token is followed from the advantage to the
    gradient, so the findings rest on the trainer's own tensors and not only on its log; the asynchronous trainer, and
    losses that are not known, are watched by their log, losses and gradients. Only the first process measures, and
    only its own completions. The callback calls no model and draws no random number.

    `on_nonfinite`, when the loss or the gradient norm of a step is not finite:

        warn      the step is taken, as TRL would, and named
        stop      the step is not taken, and training stops: the weights are those before the step
        rollback  the step is not taken, and training goes on; after five in a row it stops

    DeepSpeed steps before a callback is asked: there, stop and rollback both stop after the step. What a GradScaler
    (fp16) skips by itself is left to it. Findings are printed once, when they begin. `output_dir/leadline/` holds
    metrics, findings and the last `blackbox_steps` steps at token level, see `trl_files`.

    Raises ConfigError: `on_nonfinite` is none of the three.
    """

    def __init__(self, on_nonfinite: OnNonfinite = "stop", blackbox_steps: int = 4) -> None:
        if on_nonfinite not in get_args(OnNonfinite):
            raise ConfigError(
                f"on_nonfinite is {on_nonfinite!r}, but no such answer to a step that is not finite exists. Such a step "
                f"must not pass by chance. Use one of: {', '.join(get_args(OnNonfinite))}."
            )
        self.on_nonfinite = on_nonfinite
        self.blackbox_steps = blackbox_steps
        self.findings: list[Finding] = []
        """All that have begun, in order."""
        self._rows: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._count = 0
        self._held: dict[str, int] = {}
        self._probe: Probe | None = None
        self._settings: Mapping[str, Any] = {}
        self._files: Files | None = None
        self._nonfinite = self._undone = False
        self._undone_in_a_row = 0
        self._measures = True
        self._asked_before = 0
        """The rules have been asked about all steps before this one."""
        self._ask_again = -math.inf

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens to the trainer from its first step."""
        if self._probe:
            self._probe.remove()
        self._asked_before = state.global_step + 1
        trainer = trainer_calling(self)
        self._probe = Probe(trainer) if trainer else None
        if self._probe:
            self._probe.install()
        options = args.to_dict()
        self._settings = canonical_settings(options, TRL)
        if state.is_world_process_zero:
            self._files = Files(Path(args.output_dir) / "leadline", self.blackbox_steps)
            self._files.begin(options, anew=state.global_step == 0)
            if not trainer:
                print(
                    "leadline: the trainer that calls DoctorCallback was not found. Its log is watched; a step that is "
                    "not finite can be named, but not refused.",
                    flush=True,
                )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decides whether the step may be taken."""
        self._nonfinite = self._undone = False
        probe = self._probe
        if not probe:
            return
        loss = float(torch.stack(probe.losses).sum()) if probe.losses else 0.0
        scaler = getattr(probe.trainer.accelerator, "scaler", None)
        self._nonfinite = not (math.isfinite(loss) and (math.isfinite(probe.grad_norm) or scaler is not None))
        if probe.trainer.accelerator.num_processes > 1:
            flag = torch.tensor(float(self._nonfinite), device=probe.trainer.accelerator.device)
            self._nonfinite = bool(probe.trainer.accelerator.reduce(flag, reduction="sum") > 0)
        if self._nonfinite and self.on_nonfinite != "warn":
            self._refuse(probe, kwargs.get("optimizer"), loss, state, control)
        self._undone_in_a_row = self._undone_in_a_row + 1 if self._undone else 0

    def _refuse(self, probe: Probe, optimizer: Any, loss: float, state: Any, control: Any) -> None:
        self._undone = "DEEPSPEED" not in str(probe.trainer.accelerator.distributed_type) and optimizer is not None
        if self._undone:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # an optimizer passes over parameters without a gradient, moments included
        enough = self._undone_in_a_row + 1 >= MAX_UNDONE
        stops = self.on_nonfinite == "stop" or not self._undone or enough
        control.should_training_stop = control.should_training_stop or stops
        if state.is_world_process_zero:
            what = "It was not taken: the weights are those before it." if self._undone else "It is already taken."
            then = "Training stops." if stops else "Training goes on."
            numbers = f"loss {loss:g}, gradient norm {probe.grad_norm:g}"
            print(f"leadline: step {state.global_step + 1} is not finite ({numbers}). {what} {then}", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures the step."""
        probe = self._probe
        row: dict[str, float] = {"step": float(state.global_step)}
        if self._nonfinite:
            control.should_log = True  # a step that is not finite is never passed over by the log
        if probe and state.is_world_process_zero:
            if probe.losses:
                row["loss"] = float(torch.stack(probe.losses).sum())
            row |= {"optimizer/grad_norm": probe.grad_norm, **probe.generation}
            if self.on_nonfinite != "warn":
                row["optimizer/discarded_steps"] = float(self._undone)
            if not self._nonfinite and not math.isfinite(probe.grad_norm):
                row |= {"optimizer/update_successful": 0.0}
                del row["optimizer/grad_norm"]
            row |= self._measured(probe, args, state)
        if probe:
            probe.take()
        self._rows.append(row)
        self._count += 1
        if not control.should_log and self._files:
            self._files.write_row(row)

    def _measured(self, probe: Probe, args: Any, state: Any) -> dict[str, float]:
        """The ledger and its company; what cannot be measured is said once, and the log is watched on."""
        if not self._measures or not self._files:
            return {}
        try:
            row, tensors = self._taken(probe)
            if tensors and (self.blackbox_steps or self._nonfinite):
                self._files.write_blackbox(state.global_step, tensors, keep=self._nonfinite)
        except Exception as error:  # the doctor must not end a run because it failed to examine it
            self._measures = False
            print(
                f"leadline: step {state.global_step} could not be measured ({type(error).__name__}: {error}). The "
                "ledger ends here; log, loss and gradient are watched on.",
                flush=True,
            )
            return {}
        return row

    def _taken(self, probe: Probe) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics and black box of the step; empty if the trainer is not known well enough."""
        if probe.packed:
            return packed_metrics(probe.packed), packed_blackbox(probe.packed)
        if not probe.settings or not probe.seen:
            return {}, {}
        accumulation = getattr(probe.trainer, "current_gradient_accumulation_steps", len(probe.seen))
        step = Flat.concatenate([flatten(seen, probe.settings, accumulation) for seen in probe.seen])
        row = measure(step, probe.settings, discarded=self._undone, first=probe.fresh)
        return row, blackbox(step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Asks the doctor about the rows so far."""
        if not logs or not state.is_world_process_zero or not self._rows:
            return
        row = self._rows[-1]
        understood = _canonical(logs)
        if int(row["step"]) != state.global_step or not understood:
            return
        measured = dict(row)
        if "loss" in understood:
            measured.pop("loss", None)  # the log's own, so that a NaN shown as 0.0 is seen
        row.clear()
        row.update({**understood, **measured, "step": float(state.global_step)})
        if "loss" in logs and self._files:
            self._files.write_row(row)
        urgent = not all(math.isfinite(understood.get(name, 0.0)) for name in URGENT)  # the next step may not come
        if self._nonfinite or urgent or time.monotonic() >= self._ask_again:
            self._examine(state.global_step)

    def _examine(self, step: int) -> None:
        """Asks the rules about the steps since the last time; prints what begins."""
        began = time.monotonic()
        run = RunLog(
            rows=list(self._rows),
            config=self._settings,
            framework=TRL.name,
            could_log=TRL.could_log,
            options=TRL.options,
        )
        for finding in findings_since(run, self._asked_before):
            last = self._held.get(finding.rule)
            self._held[finding.rule] = self._count
            if last is not None and self._count - last < QUIET_ROWS:
                continue
            self.findings.append(finding)
            if self._files:
                self._files.write_finding(finding)
            print(_told(finding, step), flush=True)
        self._asked_before = step + 1
        now = time.monotonic()
        self._ask_again = now + (now - began) / MOST_TIME

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks about the last steps; the trainer is as it was."""
        if state.is_world_process_zero and self._rows and self._asked_before <= state.global_step:
            self._examine(state.global_step)
        if self._probe:
            self._probe.remove()


def _canonical(logs: Mapping[str, Any]) -> dict[str, float]:
    """A row of TRL's log in leadline's names. None (TRL's word for "all values were NaN") is NaN."""
    keys = frozenset(logs)
    different = TRL.refine(keys, logs.get) if TRL.refine else {}
    row: dict[str, float] = {}
    for key, value in logs.items():
        target = different.get(key) or TRL.find(key)
        if target is None or not isinstance(value, int | float | None):
            continue
        if isinstance(target, str):
            row[target] = math.nan if value is None else float(value)
        else:
            row[target.name] = math.nan if value is None else target.factor * float(value) + target.offset
    return row


def _told(finding: Finding, step: int) -> str:
    lines = [
        f"leadline: {finding.severity} at step {step}: {finding.title} [{finding.name}, {finding.confidence}]",
        f"  {finding.message}",
        f"  Do: {' '.join(finding.fix.split())}",
    ]
    return "\n".join([*lines, f"  {finding.avoid}"] if finding.avoid else lines)
