"""What a run leaves behind, written so that a kill at any instant loses nothing that was whole.

    config.json          every setting, resolved
    environment.json     versions of what it ran on
    metrics.jsonl        one line per step; an absent key was not measured, "NaN" was measured and is undefined
    findings.jsonl       what the doctor said, when it began
    stalls.jsonl         when the run stood still: who waited for whom
    evaluations.jsonl    mean reward of each held-out prompt, and the metrics of the evaluation
    rollouts/            step_000012.parquet: one row per rollout
    blackbox/            step_000012.safetensors and .json: the last steps at token level, and the discarded ones
    checkpoints/         step_000020/: what the caller writes

A step's files carry its number after the update: the first update is step 1, its checkpoint `step_000001`.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from leadline.config import dump_config, parse_config
from leadline.doctor.json_lines import read_lines, to_line
from leadline.doctor.rule import Finding
from leadline.durable import leftovers, partial_file, remove, write_whole
from leadline.errors import RunDirError
from leadline.sft.config import AnyConfig
from leadline.types import Group, Rollout

if TYPE_CHECKING:
    from torch import Tensor

MAX_KEPT = 20
"""Most black boxes that are kept for ever: the first ones, which show how the trouble began."""

_PACKAGES = ("leadline", "torch", "transformers", "safetensors", "peft", "vllm")


class RunDir:
    """The directory of one run. Every method raises RunDirError if the disk refuses."""

    def __init__(self, path: Path, config: AnyConfig) -> None:
        self.path = path
        self.config = config
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.blackbox = path / "blackbox"

    @staticmethod
    def check_free(path: Path) -> None:
        """Raises RunDirError if the path holds a run already."""
        if any((path / name).exists() for name in ("config.json", "metrics.jsonl")):
            raise RunDirError(
                f"run.dir is {str(path)!r}, but it already holds a run. Its metrics and checkpoints would mix with new "
                "ones. Continue that run with --resume, or choose another directory with --set run.dir=runs/NAME."
            )

    @classmethod
    def create(cls, path: Path, config: AnyConfig) -> Self:
        """The directory of a new run. Raises RunDirError if it holds a run already."""
        cls.check_free(path)
        run = cls(path, config)
        with run._storing("the run directory"):
            for folder in (run.checkpoints, run.rollouts, run.blackbox):
                folder.mkdir(parents=True, exist_ok=True)
            write_whole(path / "environment.json", json.dumps(_environment(), indent=2).encode())
            write_whole(path / "config.json", dump_config(config).encode())
        return run

    @classmethod
    def open(cls, path: Path, parse: Callable[[dict[str, Any]], AnyConfig] = parse_config) -> Self:
        """The directory of an existing run, for reading: nothing in it is touched. Raises RunDirError."""
        try:
            return cls(path, parse(json.loads((path / "config.json").read_text())))
        except (OSError, ValueError) as error:
            raise RunDirError(
                f"run.dir is {str(path)!r}, but no config.json of a run can be read there ({error}). There is nothing "
                "to continue. Start a new run without --resume, or give the directory of a run."
            ) from error

    @classmethod
    def resume(cls, path: Path, parse: Callable[[dict[str, Any]], AnyConfig] = parse_config) -> Self:
        """The directory of an existing run, as it was right after its last whole checkpoint (or before step 1)."""
        run = cls.open(path, parse)
        latest = run.latest_checkpoint()
        run.rewind(latest[0] if latest else 0)
        return run

    def adopt(self, config: AnyConfig) -> None:
        """From now on the run has these settings."""
        self.config = config
        with self._storing("config.json"):
            write_whole(self.path / "config.json", dump_config(config).encode())

    def rewind(self, step: int) -> None:
        """Drops all that was left after `step`, and what a kill left unfinished. Safe to repeat after a kill."""
        with self._storing("the rewound run"):
            for leftover in leftovers(self.path):
                remove(leftover)
            for folder in (self.checkpoints, self.rollouts, self.blackbox):
                for entry, entry_step in reversed(_entries(folder)):
                    if entry_step > step:
                        remove(entry)
            for name in ("metrics.jsonl", "findings.jsonl", "evaluations.jsonl"):
                _keep_rows(self.path / name, step)

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Appends one line; `metrics` has `step`."""
        assert "step" in metrics, f"metrics without step: {sorted(metrics)}"
        self._append("metrics.jsonl", dict(metrics))

    def write_finding(self, finding: Finding) -> None:
        """Appends one line to findings.jsonl."""
        self._append("findings.jsonl", finding.to_dict())

    def write_preflight(self, found: Mapping[str, Any]) -> None:
        """preflight.json: what was looked at before the first step, when this run was last started."""
        with self._storing("preflight.json"):
            write_whole(self.path / "preflight.json", json.dumps(found, indent=2).encode())

    def write_stall(self, step: int, text: str) -> None:
        """Appends one line to stalls.jsonl: what the watchdog said after this step, and when."""
        self._append("stalls.jsonl", {"step": step, "time": time.time(), "said": text})

    def write_evaluation(
        self, step: int, rewards: Sequence[float], metrics: Mapping[str, float], passes: Sequence[float] = ()
    ) -> None:
        """Appends one line to evaluations.jsonl; `rewards` and `passes` are by held-out prompt, in order."""
        row = {"step": step, "rewards": list(rewards), "passes": list(passes), "metrics": dict(metrics)}
        self._append("evaluations.jsonl", row)

    def write_rollouts(
        self, step: int, groups: Sequence[Group], advantages: Sequence[float], fates: Sequence[str]
    ) -> None:
        """One row per rollout, in group order, in each step that `run.rollouts_every` divides.

        `fates`: the ledger stage at which each rollout ended. Null = there is none; a NaN reward or advantage stays NaN.
        """
        every = self.config.run.rollouts_every
        if not every or step % every:
            return
        import polars

        pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
        labels = [reward.resolved_label for reward in self.config.rewards]
        rows = [
            {"step": step, **_rollout_row(group, rollout, labels), "advantage": advantage, "fate": fate}
            for (group, rollout), advantage, fate in zip(pairs, advantages, fates, strict=True)
        ]
        target = self.rollouts / f"{_stem(step)}.parquet"
        with self._storing(f"rollouts/{target.name}"), partial_file(target) as partial:
            polars.DataFrame(rows, schema=_rollout_schema(labels), orient="row").write_parquet(partial)

    def write_blackbox(
        self, step: int, tensors: Mapping[str, "Tensor"], info: Mapping[str, Any], *, keep: bool = False
    ) -> None:
        """The step at token level. Only the last `run.blackbox_steps` stay, and the first `MAX_KEPT` with `keep`."""
        recent = self.config.run.blackbox_steps
        if not recent and not keep:
            return
        from safetensors.torch import save_file

        kept = keep and len(self._kept_blackboxes()) < MAX_KEPT
        target = self.blackbox / f"{_stem(step)}.safetensors"
        sidecar = {"step": step, "kept": kept, "config": self.config.model_dump(mode="json"), "info": info}
        with self._storing(f"blackbox/{target.name}"):
            with partial_file(target) as partial:
                # safetensors refuses views that share storage
                save_file(
                    {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, partial
                )
            write_whole(target.with_suffix(".json"), to_line(sidecar))
            self._prune_blackboxes(recent)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """`write` fills a temporary directory, which becomes `checkpoints/step_...` in one rename once it is on disk.

        Then all but the last `run.keep_checkpoints` are removed. If `write` or the disk fails, the temporary is removed
        and the checkpoints are what they were. A checkpoint of the same step is already there: nothing is written.
        """
        target = self.checkpoints / _stem(step)
        if target.exists():
            return
        with self._storing(f"checkpoints/{target.name}"):
            with partial_file(target) as partial:
                partial.mkdir(parents=True)
                write(partial)
            for entry, _ in _entries(self.checkpoints)[: -self.config.run.keep_checkpoints]:
                remove(entry)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and directory of the last whole checkpoint; None if there is none."""
        entries = _entries(self.checkpoints)
        return (entries[-1][1], entries[-1][0]) if entries else None

    def _kept_blackboxes(self) -> set[int]:
        sidecars = (json.loads(path.read_text()) for path, _ in _entries(self.blackbox) if path.suffix == ".json")
        return {sidecar["step"] for sidecar in sidecars if sidecar["kept"]}

    def _prune_blackboxes(self, recent: int) -> None:
        kept = self._kept_blackboxes()
        others = sorted({step for _, step in _entries(self.blackbox)} - kept)
        past = set(others[: max(0, len(others) - recent)])
        for entry, step in _entries(self.blackbox):
            if step in past:
                remove(entry)

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with self._storing(name), (self.path / name).open("ab", buffering=0) as file:
            # unbuffered: one write, so a kill leaves at most one half line, the last
            line = to_line(values)
            if file.write(line) != len(line):
                raise OSError("the line was cut short")

    @contextmanager
    def _storing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _disk_refused(error):
                raise
            latest = self.latest_checkpoint()
            state = f"the last whole checkpoint is step {latest[0]}" if latest else "there is no checkpoint yet"
            raise RunDirError(
                f"run.dir is {str(self.path)!r}, but {what} cannot be written there ({error}). The run stops here; "
                f"{state}. Free space or mend the permissions, then continue with --resume."
            ) from error


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl; a half-written last line is left out. Raises RunDirError (see `read_lines`)."""
    return read_lines(path)


def read_findings(path: Path) -> list[Finding]:
    """The findings of a findings.jsonl; none if the file does not exist. Raises RunDirError (see `read_lines`)."""
    return [Finding.from_dict(values) for values in read_lines(path)] if path.exists() else []


def read_evaluations(path: Path) -> list[tuple[int, list[float], list[float], dict[str, float]]]:
    """(step, rewards, passes, metrics) of each line of an evaluations.jsonl; none if the file does not exist.

    Passes are NaN where none were written: of a fine-tuning, or by an earlier version.
    """
    rows = read_lines(path) if path.exists() else []
    unknown = math.nan
    return [
        (row["step"], row["rewards"], row.get("passes") or [unknown] * len(row["rewards"]), row["metrics"])
        for row in rows
    ]


def _keep_rows(path: Path, step: int) -> None:
    if path.exists():
        write_whole(path, b"".join(to_line(values) for values in read_lines(path) if _written_at(values) <= step))


def _written_at(values: Mapping[str, Any]) -> float:
    """The step of a row. A finding's own step is when the trouble began: what proves it came with the last evidence."""
    return max((item["step"] for item in values.get("evidence", ())), default=values["step"])  # type: ignore[no-any-return]


def _rollout_row(group: Group, rollout: Rollout, labels: Sequence[str]) -> dict[str, Any]:
    completion = rollout.completion
    scored = [logprob for logprob in completion.logprobs if not math.isnan(logprob)]
    return {
        "prompt_index": group.prompt.index,
        "prompt": group.prompt.text,
        "completion": rollout.text,
        "prompt_token_ids": list(group.prompt.token_ids),
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "reward": rollout.reward,
        **{f"reward/{label}": rollout.rewards.get(label) for label in labels},
        "policy_version_min": min(completion.policy_versions, default=None),
        "policy_version_max": max(completion.policy_versions, default=None),
        "mean_logprob": sum(scored) / len(scored) if scored else None,
        "unscored_tokens": len(completion.logprobs) - len(scored),
        "replayed": group.replayed,
        "error": rollout.error,
    }


def _rollout_schema(labels: Sequence[str]) -> dict[str, Any]:
    import polars

    tokens = polars.List(polars.Int64)
    return {
        "step": polars.Int64,
        "prompt_index": polars.Int64,
        "prompt": polars.String,
        "completion": polars.String,
        "prompt_token_ids": tokens,
        "token_ids": tokens,
        "finish_reason": polars.String,
        "reward": polars.Float64,
        **{f"reward/{label}": polars.Float64 for label in labels},
        "advantage": polars.Float64,
        "policy_version_min": polars.Int64,
        "policy_version_max": polars.Int64,
        "mean_logprob": polars.Float64,
        "unscored_tokens": polars.Int64,
        "fate": polars.String,
        "replayed": polars.Boolean,
        "error": polars.String,
    }


def _stem(step: int) -> str:
    return f"step_{step:06d}"


def _entries(folder: Path) -> list[tuple[Path, int]]:
    """The whole files or directories of a folder with their steps, oldest step first."""
    named = [(path, path.name.removeprefix("step_").split(".")[0]) for path in folder.glob("step_*")]
    return sorted(((path, int(digits)) for path, digits in named if digits.isdigit()), key=lambda entry: entry[1])


def _disk_refused(error: Exception) -> bool:
    """Whether the operating system is at fault. safetensors and torch.save report a full disk in their own ways."""
    return (
        isinstance(error, OSError)
        or type(error).__name__ in ("SafetensorError", "ComputeError")
        or (isinstance(error, RuntimeError) and "inline_container" in str(error))
    )


def _environment() -> dict[str, Any]:
    return {"versions": {"python": platform.python_version()} | _package_versions(), "platform": platform.platform()}


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
