"""One run from recipe to result: build the parts, evaluate, train, record, evaluate again."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from leadline.compute import computed, computes
from leadline.config import Config
from leadline.data import PromptData, load_prompts
from leadline.doctor.examine import live_findings
from leadline.doctor.rule import Finding
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.engines.vllm_build import build_inprocess_engine, build_vllm_engine
from leadline.engines.vllm_server import check_installed
from leadline.errors import ConfigError, EngineError, NoSignalError, RewardError, StalledError, TrainingError
from leadline.evaluate import Evaluation, Improvement, evaluate, improvement
from leadline.loop.concurrency import PlainTaskGroup
from leadline.loop.place import Place
from leadline.loop.watchdog import Watchdog
from leadline.loop.writer import Writer
from leadline.models import Loaded, load_model
from leadline.policy.memory import plan_memory
from leadline.policy.policy import Policy
from leadline.policy.profile import Profile, gemm_rate, update_flops
from leadline.probes.engine.live import measure_mismatch
from leadline.probes.preflight.flight import Preflight, show_checks
from leadline.probes.preflight.parts import Parts
from leadline.rewards.scorer import build_scorer
from leadline.rollouts import Roller
from leadline.run_dir import RunDir, read_evaluations, read_metrics
from leadline.screen import Screen
from leadline.settings.section import Section
from leadline.trackers import Tracker, open_trackers
from leadline.train import Step, train
from leadline.types import Group

POSITION = "position.json"
"""In a checkpoint: the `Place` where the stream of groups goes on."""


@dataclass(slots=True)
class Session:
    """The parts of a run, and what it has measured so far."""

    config: Config
    policy: Policy
    engine: Engine
    roller: Roller
    data: PromptData
    run_dir: RunDir
    screen: Screen
    trackers: list[Tracker]
    stopping: Callable[[], bool]
    place: Place = field(default_factory=Place)
    rows: list[dict[str, float]] = field(default_factory=list)
    """Metrics by step."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """By step; 0 is before the first."""
    findings: list[Finding] = field(default_factory=list)
    """Those that hold at the last step."""

    profile: Profile | None = None
    """Where the time goes, if that was asked for."""
    watchdog: Watchdog = field(init=False)
    """To be entered around `run` by whoever owns the process."""
    preflight: Preflight | None = None
    """What was looked at before the first step; None = nothing is, and nothing is said of it."""
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _writer: Writer = field(default_factory=Writer)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(
            self.roller.activity,
            warning_s=self.config.run.stall_warning_s,
            limit_s=self.config.run.stall_limit_s,
            say=self._say_stalled,
            rescue=self._save,
            tracebacks=self.run_dir.path / "stalled.txt",
        )

    @computes
    def start_profile(self) -> None:
        """From now on each step is profiled: its stages wait for the accelerator, and the machine's limit is measured."""
        self.policy.stopwatch.waits = True
        self.profile = Profile(gemm_rate(self.policy.model, min(self.policy.budget.tokens, 1024)))

    async def run(self) -> None:
        """Evaluate, train, evaluate."""
        try:
            async with PlainTaskGroup() as tasks:
                watching = tasks.create_task(self.watchdog.until_stalled())
                await self._run()
                watching.cancel()
        except (TrainingError, NoSignalError, RewardError, EngineError, StalledError):
            # The steps before the trouble are worth having. The compute thread may be what hangs.
            await asyncio.to_thread(self._save)
            raise
        finally:
            with self.roller.activity.trainer("waits for the engine to close"):
                await self.engine.close()
            for tracker in self.trackers:
                tracker.close()
            self._writer.finish()

    def improvement(self) -> Improvement | None:
        """What the last evaluation found against the first; None = there are no two."""
        if len(self.evaluations) < 2:
            return None
        return improvement(
            self.evaluations[min(self.evaluations)], self.evaluations[max(self.evaluations)], self.config.run.seed
        )

    @property
    def finished(self) -> bool:
        """Every step is made, and the last evaluation too."""
        return self.policy.version >= self.config.run.steps and not self._evaluation_is_due()

    async def _run(self) -> None:
        version = self.policy.version
        with self.roller.activity.trainer(f"waits for the engine to load the weights of version {version}"):
            await self.engine.load_weights(await computed(self.policy.weights), version)
        await self._look_before_the_first_step()
        await self._evaluate()  # also when resumed: a kill may have come between a step and its evaluation
        await train(
            self.config,
            policy=self.policy,
            engine=self.engine,
            roller=self.roller,
            prompts=self.data.train,
            record=self._record,
            measure=self._mismatch,
            evaluate=self._evaluate_between_steps,
            place=self.place,
            stage=self.screen.stage,
            stopping=self.stopping,
        )
        await computed(self._save)
        if not self.stopping():
            await self._evaluate()

    async def _look_before_the_first_step(self) -> None:
        """Finish the preflight on a few tokens of the engine. Raises what it finds."""
        if self.preflight is None or self.finished:
            return
        self.screen.stage("preflight")
        with self.roller.activity.trainer("checks engine and policy on a few tokens"):
            show_checks(await self.preflight.with_engine(self.engine), self.screen.message)
        self.run_dir.write_preflight(self.preflight.to_dict())
        self.preflight.raise_if_wrong()

    async def _record(self, step: Step) -> None:
        """Write down one step; checkpoint when it is time."""
        started = time.perf_counter()
        self.place = step.place
        self.rows.append(step.metrics)
        self._find(step.number)
        self.run_dir.write_metrics(step.metrics)
        for tracker in self.trackers:
            tracker.log(step.number, step.metrics)
        await self._writer.put(partial(self._write_tokens, step))
        self.screen.show(step.metrics, self.findings)
        if self.profile is not None:
            flops = update_flops(self.policy.model, step.batch, passes=self.config.optimizer.epochs_per_batch)
            self.profile.add(step.metrics, flops, time.perf_counter() - started)
        every = self.config.run.checkpoint_every
        if every and step.number % every == 0:
            await computed(self._save)

    def _write_tokens(self, step: Step) -> None:
        """Its rollouts and its black box: on a thread, for nothing in the run waits for them but the next checkpoint."""
        self.run_dir.write_rollouts(step.number, step.groups, step.batch.advantages.tolist(), step.update.fates)
        self.run_dir.write_blackbox(step.number, step.update.blackbox, _about(step), keep=step.update.discarded)

    async def _mismatch(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """How far engine and policy are apart, if it is time to look. The engine holds the policy's weights now."""
        every = self.config.run.mismatch_every
        if not every or self.policy.version % every:
            return {}
        prompts, total = [group.prompt for group in groups], metrics.get("importance/log_ratio_abs_mean")
        with self.roller.activity.trainer("measures the gap between engine and policy"):
            return await measure_mismatch(self.policy, self.engine, prompts, total, self.config)

    def _find(self, step: int) -> None:
        """Ask the doctor about the rows so far; a finding is written when it begins."""
        findings = live_findings(self.rows, self.config.model_dump(mode="json"), step)
        before = {finding.rule for finding in self.findings}
        for finding in findings:
            if finding.rule not in before:
                self.run_dir.write_finding(finding)
        self.findings = findings

    def _evaluation_is_due(self) -> bool:
        step, every = self.policy.version, self.config.eval.every
        at_its_time = step in (0, self.config.run.steps) or (every and step % every == 0)
        return bool(self.data.held_out and at_its_time and step not in self.evaluations)

    async def _evaluate_between_steps(self) -> None:
        if self.policy.version < self.config.run.steps:  # the last evaluation comes after the last checkpoint
            await self._evaluate()

    async def _evaluate(self) -> None:
        """On the held-out prompts, if it is time to and was not done at this step."""
        step = self.policy.version
        if not self._evaluation_is_due():
            return
        self.screen.stage("evaluate")
        with self.roller.activity.trainer(f"evaluates on {len(self.data.held_out)} held-out prompts"):
            evaluation = await evaluate(self.roller, self.data.held_out, self.config)
        self.evaluations[step] = evaluation
        self.run_dir.write_evaluation(step, evaluation.rewards, evaluation.metrics, evaluation.passes)
        for tracker in self.trackers:
            tracker.log(step, evaluation.metrics)
        self.screen.show({"step": float(step), **evaluation.metrics}, self.findings)

    def _save(self) -> None:
        """Checkpoint the last step, unless weights are ahead of what is written down of it, or change just now."""
        self._writer.finish()  # a checkpoint is of steps that are written down whole
        step, place = self.policy.version, self.place

        def write(directory: Path) -> None:
            self.policy.save(directory)
            (directory / POSITION).write_text(place.to_json())

        if self.rows and self.rows[-1]["step"] == step and not self.roller.activity.weights_change:
            with self._saving:
                self.run_dir.save_checkpoint(step, write)

    def _say_stalled(self, text: str) -> None:
        self.screen.message(text)
        self.run_dir.write_stall(self.policy.version, text)


def _about(step: Step) -> dict[str, Any]:
    """What the tensors of a black box do not say."""
    return {
        "discarded": step.update.discarded,
        "prompts": [group.prompt.text for group in step.groups],
        "finish_reasons": [r.completion.finish_reason.value for group in step.groups for r in group.rollouts],
        "replayed": sorted(step.batch.replayed),
    }


@computes
def open_session(config: Config, path: Path, *, resume: bool, stopping: Callable[[], bool], screen: Screen) -> Session:
    """Everything a run needs, checked: after this returns only the run itself can fail, before it nothing is written.

    Raises ConfigError, ModelError, DataError, RewardError, RunDirError.
    """
    if resume:
        check_same_run(RunDir.open(path).config, config, KEPT)
    else:
        RunDir.check_free(path)
    check_engine(config)
    parts = load_parts(config, screen.stage, screen.message)
    preflight = Preflight(parts)
    screen.stage("preflight")
    show_checks(preflight.before_engine(), screen.message)
    preflight.raise_if_wrong()
    loaded, data, policy = parts.loaded, parts.data, parts.policy
    engine = build_engine(config, loaded, path, screen.message)
    roller = Roller(engine, parts.scorer, loaded.tokenizer, loaded.eos_ids, config)
    trackers = open_trackers(config.run.trackers, path, config)
    run_dir = RunDir.resume(path) if resume else RunDir.create(path, config)
    session = Session(config, policy, engine, roller, data, run_dir, screen, trackers, stopping, preflight=preflight)
    if resume:
        run_dir.adopt(config)
        _restore(session)
    return session


def load_parts(config: Config, stage: Callable[[str], None], say: Callable[[str], None]) -> Parts:
    """All that a run needs but for an engine; what a person should know goes to `say`.

    Raises ConfigError, ModelError, DataError, RewardError.
    """
    scorer = build_scorer(config.rewards, config.decoding)
    stage("load model")
    disable_progress_bar()  # of transformers and the hub: a file takes no time, and the bars would cut the screen
    loaded = load_model(config.model, config.run.seed)
    data = load_prompts(config, loaded.tokenizer, context_length=loaded.context_length)
    scorer.check_columns(data.columns)
    policy = Policy(loaded, config)
    for line in policy.slow_paths:
        say(f"model.name is {config.model.name!r}. {line}")
    forecast = plan_memory(policy, [data.train.prompt(i) for i in range(len(data.train))])
    return Parts(config, loaded, data, scorer, policy, forecast)


def check_engine(config: Config) -> None:
    """Raise ConfigError unless a run can sample from `engine.kind`, EngineError if vLLM is needed and missing."""
    if config.engine.kind == "scripted":
        raise ConfigError(
            "engine.kind is 'scripted', but a script is no policy. Nothing could be learned. Set engine.kind = 'hf' or "
            "'vllm'; check the recipe without training with --dry-run."
        )
    if config.engine.kind.startswith("vllm") and not config.engine.urls:
        check_installed()


def build_engine(config: Config, loaded: Loaded, path: Path, say: Callable[[str], None]) -> Engine:
    """The engine that samples from the model; what it leaves goes to `path`, what a person should know to `say`."""
    if loaded.new_tokens and config.engine.kind != "hf":
        raise ConfigError(
            f"model.add_special_tokens is {list(config.model.add_special_tokens)}, which {config.model.name!r} lacks, but "
            f"engine.kind is {config.engine.kind!r}, which loads the model from there. Its embedding would be too small. "
            "Train them in first (leadline sft) and name the model that it saves, or set engine.kind = 'hf'."
        )
    if config.engine.kind == "vllm":
        return build_vllm_engine(config, loaded, path / "vllm.log", say)
    if config.engine.kind == "vllm_inprocess":
        return build_inprocess_engine(config, loaded, say)
    return HFEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        seed=config.run.seed,
        max_batch=config.engine.max_batch,
        dtype=config.engine.dtype,
        own_copy=config.rollout.max_staleness > 0,
    )


KEPT = re.compile(
    r"model\.(name|tokenizer|dtype|lora_\w+|add_special_tokens|chat_template_kwargs)|data\..+|rewards"
    r"|eval\.(prompts|samples|temperature)"
    r"|run\.seed"
)
"""Settings that a resumed run keeps: with others, the weights, the prompts or the evaluations would not fit together."""


def check_same_run(before: Section, now: Section, kept: re.Pattern[str]) -> None:
    """Raise ConfigError if a resumed run has another value for a setting whose name is of the pattern `kept`."""
    old, new = _kept_settings(before, kept), _kept_settings(now, kept)
    problems = [
        f"{name} is {new[name]!r}, but the run in this directory was started with {old[name]!r}. What it has learned "
        "and measured would not fit. Set it back, or start a new run in another run.dir."
        for name in old
        if new[name] != old[name]
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _kept_settings(config: Section, kept: re.Pattern[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, settings in config.model_dump(mode="json").items():
        if isinstance(settings, dict):
            values |= {f"{section}.{name}": value for name, value in settings.items()}
        else:
            values[section] = settings
    return {name: value for name, value in values.items() if kept.fullmatch(name)}


def _restore(session: Session) -> None:
    """Go on from the last checkpoint as if nothing had happened."""
    path = session.run_dir.path
    session.evaluations = {
        step: Evaluation(tuple(rewards), tuple(passes), metrics)
        for step, rewards, passes, metrics in read_evaluations(path / "evaluations.jsonl")
    }
    session.screen.restore([{"step": step, **e.metrics} for step, e in session.evaluations.items()])
    latest = session.run_dir.latest_checkpoint()
    if latest is None:
        return
    step, directory = latest
    session.policy.restore(directory)
    session.place = Place.from_json((directory / POSITION).read_text())
    session.data.train.seek(session.place.position)
    session.rows = read_metrics(path / "metrics.jsonl")
    session.findings = live_findings(session.rows, session.config.model_dump(mode="json"), step)
    session.screen.restore(session.rows)
