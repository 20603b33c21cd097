"""One run from recipe to result: build the parts, evaluate, train, record, evaluate again."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from leadline.config import Config
from leadline.data import PromptData, load_prompts
from leadline.doctor.examine import live_findings
from leadline.doctor.rule import Finding
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.engines.vllm_build import build_vllm_engine
from leadline.engines.vllm_server import check_installed
from leadline.errors import ConfigError, EngineError, NoSignalError, RewardError, TrainingError
from leadline.evaluate import Difference, Evaluation, evaluate, paired_difference
from leadline.models import Loaded, load_model
from leadline.policy import Policy
from leadline.rewards.scorer import build_scorer
from leadline.rollouts import Roller
from leadline.run_dir import RunDir, read_evaluations, read_metrics
from leadline.screen import Screen
from leadline.trackers import Tracker, open_trackers
from leadline.train import Step, train

POSITION = "position.json"
"""In a checkpoint: where the prompt stream goes on."""


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
    position: int
    rows: list[dict[str, float]] = field(default_factory=list)
    """Metrics by step."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """By step; 0 is before the first."""
    findings: list[Finding] = field(default_factory=list)
    """Those that hold at the last step."""

    async def run(self) -> Difference | None:
        """Evaluate, train, evaluate. Returns the paired difference of the first and the last evaluation."""
        try:
            await self.engine.load_weights(self.policy.weights(), self.policy.version)
            await self._evaluate()  # also when resumed: a kill may have come between a step and its evaluation
            await self._train()
            if not self.stopping():
                await self._evaluate()
        finally:
            await self.engine.close()
            for tracker in self.trackers:
                tracker.close()
        first, last = min(self.evaluations, default=0), max(self.evaluations, default=0)
        if first == last:
            return None
        return paired_difference(self.evaluations[first].rewards, self.evaluations[last].rewards, self.config.run.seed)

    @property
    def finished(self) -> bool:
        """Every step is made, and the last evaluation too."""
        return self.policy.version >= self.config.run.steps and not self._evaluation_is_due()

    async def _train(self) -> None:
        try:
            await train(
                self.config,
                policy=self.policy,
                engine=self.engine,
                roller=self.roller,
                prompts=self.data.train,
                record=self._record,
                stage=self.screen.stage,
                stopping=self.stopping,
            )
        except (TrainingError, NoSignalError, RewardError, EngineError):
            if self.rows and self.policy.version == self.rows[-1]["step"]:
                await self._checkpoint()  # it stands between two steps: those before the trouble are worth having
            raise
        await self._checkpoint()

    async def _record(self, step: Step) -> None:
        """Write down one step; evaluate and checkpoint when it is time."""
        self.position = step.position
        self.rows.append(step.metrics)
        self._find(step.number)
        self.run_dir.write_metrics(step.metrics)
        for tracker in self.trackers:
            tracker.log(step.number, step.metrics)
        self.run_dir.write_rollouts(step.number, step.groups, step.batch.advantages.tolist(), step.update.fates)
        info = {"discarded": step.update.discarded, "prompts": [group.prompt.text for group in step.groups]}
        self.run_dir.write_blackbox(step.number, step.update.blackbox, info, keep=step.update.discarded)
        self.screen.show(step.metrics, self.findings)
        every = self.config.run.checkpoint_every
        if every and step.number % every == 0:
            await self._checkpoint()
        if step.number < self.config.run.steps:  # the last evaluation comes after the last checkpoint
            await self._evaluate()

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

    async def _evaluate(self) -> None:
        """On the held-out prompts, if it is time to and was not done at this step."""
        step = self.policy.version
        if not self._evaluation_is_due():
            return
        self.screen.stage("evaluate")
        evaluation = await evaluate(self.roller, self.data.held_out, self.config)
        self.evaluations[step] = evaluation
        self.run_dir.write_evaluation(step, evaluation.rewards, evaluation.metrics)
        for tracker in self.trackers:
            tracker.log(step, evaluation.metrics)
        self.screen.show({"step": float(step), **evaluation.metrics}, self.findings)

    async def _checkpoint(self) -> None:
        step, position = self.policy.version, self.position

        def write(directory: Path) -> None:
            self.policy.save(directory)
            (directory / POSITION).write_text(json.dumps({"position": position}))

        if step > 0:
            await asyncio.to_thread(self.run_dir.save_checkpoint, step, write)


def open_session(config: Config, path: Path, *, resume: bool, stopping: Callable[[], bool], screen: Screen) -> Session:
    """Everything a run needs, checked: after this returns only the run itself can fail, before it nothing is written.

    Raises ConfigError, ModelError, DataError, RewardError, RunDirError.
    """
    if resume:
        _check_same_run(RunDir.open(path).config, config)
    else:
        RunDir.check_free(path)
    check_engine(config)
    scorer = build_scorer(config.rewards, config.decoding)
    screen.stage("load model")
    disable_progress_bar()  # of transformers and the hub: a file takes no time, and the bars would cut the screen
    loaded = load_model(config.model, config.run.seed)
    data = load_prompts(config, loaded.tokenizer, context_length=loaded.context_length)
    scorer.check_columns(data.columns)
    policy = Policy(loaded, config)
    if not policy.packs:
        screen.message(
            f"model.name is {config.model.name!r} with model.attention = {config.model.attention!r}, whose prompts cannot "
            f"be shared within a row (logprobs would change by {policy.packing_error:.2g} nats; nan = not tried): each "
            "sequence is forwarded on its own, which is slower and right."
        )
    engine = build_engine(config, loaded, path, screen.message)
    roller = Roller(engine, scorer, loaded.tokenizer, loaded.eos_ids, config)
    trackers = open_trackers(config.run.trackers, path, config)
    run_dir = RunDir.resume(path) if resume else RunDir.create(path, config)
    session = Session(config, policy, engine, roller, data, run_dir, screen, trackers, stopping, position=0)
    if resume:
        run_dir.adopt(config)
        _restore(session)
    return session


def check_engine(config: Config) -> None:
    """Raise ConfigError unless a run can sample from `engine.kind`, EngineError if vLLM is needed and missing."""
    if config.engine.kind == "scripted":
        raise ConfigError(
            "engine.kind is 'scripted', but a script is no policy. Nothing could be learned. Set engine.kind = 'hf' or "
            "'vllm'; check the recipe without training with --dry-run."
        )
    if config.engine.kind == "vllm" and not config.engine.urls:
        check_installed()


def build_engine(config: Config, loaded: Loaded, path: Path, say: Callable[[str], None]) -> Engine:
    """The engine that samples from the model; what it leaves goes to `path`, what a person should know to `say`."""
    if config.engine.kind == "vllm":
        return build_vllm_engine(config, loaded, path / "vllm.log", say)
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
    r"model\.(name|tokenizer|dtype|lora_\w+|chat_template_kwargs)|data\..+|rewards|eval\.(prompts|samples|temperature)"
    r"|run\.seed"
)
"""Settings that a resumed run keeps: with others, the weights, the prompts or the evaluations would not fit together."""


def _check_same_run(before: Config, now: Config) -> None:
    old, new = _kept_settings(before), _kept_settings(now)
    problems = [
        f"{name} is {new[name]!r}, but the run in this directory was started with {old[name]!r}. What it has learned "
        "and measured would not fit. Set it back, or start a new run in another run.dir."
        for name in old
        if new[name] != old[name]
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _kept_settings(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, settings in config.model_dump(mode="json").items():
        if isinstance(settings, dict):
            values |= {f"{section}.{name}": value for name, value in settings.items()}
        else:
            values[section] = settings
    return {name: value for name, value in values.items() if KEPT.fullmatch(name)}


def _restore(session: Session) -> None:
    """Go on from the last checkpoint as if nothing had happened."""
    path = session.run_dir.path
    session.evaluations = {
        step: Evaluation(tuple(rewards), metrics)
        for step, rewards, metrics in read_evaluations(path / "evaluations.jsonl")
    }
    session.screen.restore([{"step": step, **e.metrics} for step, e in session.evaluations.items()])
    latest = session.run_dir.latest_checkpoint()
    if latest is None:
        return
    step, directory = latest
    session.policy.restore(directory)
    session.position = json.loads((directory / POSITION).read_text())["position"]
    session.data.train.seek(session.position)
    session.rows = read_metrics(path / "metrics.jsonl")
    session.findings = live_findings(session.rows, session.config.model_dump(mode="json"), step)
    session.screen.restore(session.rows)
