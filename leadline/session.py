"""One run from recipe to result: build the parts, evaluate, train, record, evaluate again."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from leadline.config import Config
from leadline.data import PromptData, load_prompts
from leadline.doctor.examine import live_findings
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.errors import ConfigError, TrainingError
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
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """By step; 0 is before the first."""
    active: set[str] = field(default_factory=set)
    """Rules that had a finding at the last step: a finding is written when it begins."""

    async def run(self) -> Difference | None:
        """Evaluate, train, evaluate. Returns the paired difference of the first and the last evaluation."""
        try:
            await self.engine.load_weights(self.policy.weights(), self.policy.version)
            await self._evaluate()
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
        except TrainingError:
            await self._checkpoint()  # the guard kept the weights: the steps before the trouble are worth having
            raise
        await self._checkpoint()

    async def _record(self, step: Step) -> None:
        """Write down one step; evaluate and checkpoint when it is time."""
        self.position = step.position
        self.rows.append(step.metrics)
        findings = live_findings(self.rows, self.config.model_dump(mode="json"), step.number)
        for finding in findings:
            if finding.rule not in self.active:
                self.run_dir.write_finding(finding)
        self.active = {finding.rule for finding in findings}
        self.run_dir.write_metrics(step.metrics)
        for tracker in self.trackers:
            tracker.log(step.number, step.metrics)
        self.run_dir.write_rollouts(step.number, step.groups, step.batch.advantages.tolist(), step.update.fates)
        info = {"discarded": step.update.discarded, "prompts": [group.prompt.text for group in step.groups]}
        self.run_dir.write_blackbox(step.number, step.update.blackbox, info, keep=step.update.discarded)
        self.screen.show(step.metrics, findings)
        every = self.config.run.checkpoint_every
        if every and step.number % every == 0:
            await self._checkpoint()
        if self.config.eval.every and step.number % self.config.eval.every == 0:
            await self._evaluate()

    async def _evaluate(self) -> None:
        """Once at a step, on the held-out prompts if there are any."""
        step = self.policy.version
        if not self.data.held_out or step in self.evaluations:
            return
        self.screen.stage("evaluate")
        evaluation = await evaluate(self.roller, self.data.held_out, self.config)
        self.evaluations[step] = evaluation
        self.run_dir.write_evaluation(step, evaluation.rewards, evaluation.metrics)
        for tracker in self.trackers:
            tracker.log(step, evaluation.metrics)
        mean = evaluation.metrics["eval/reward_mean"]
        self.screen.message(f"step {step}: mean reward {mean:.4f} on {len(self.data.held_out)} held-out prompts")

    async def _checkpoint(self) -> None:
        step, position = self.policy.version, self.position

        def write(directory: Path) -> None:
            self.policy.save(directory)
            (directory / POSITION).write_text(json.dumps({"position": position}))

        if step > 0:
            await asyncio.to_thread(self.run_dir.save_checkpoint, step, write)


def open_session(config: Config, path: Path, *, resume: bool, stopping: Callable[[], bool], screen: Screen) -> Session:
    """Everything a run needs, checked: after this returns only the run itself can fail.

    Raises ConfigError, ModelError, DataError, RewardError, RunDirError.
    """
    trackers = open_trackers(config.run.trackers, path, config)
    screen.stage("load model")
    loaded = load_model(config.model, config.run.seed)
    data = load_prompts(config, loaded.tokenizer, context_length=loaded.context_length)
    scorer = build_scorer(config.rewards, config.decoding)
    scorer.check_columns(data.columns)
    policy = Policy(loaded, config)
    error = policy.check_packing()
    if not policy.packs:
        screen.message(
            f"model.name is {config.model.name!r}, but a packed row changes its logprobs by {error:.2g} nats: each "
            "sequence is forwarded on its own, which is slower and right."
        )
    engine = build_engine(config, loaded)
    roller = Roller(engine, scorer, loaded.tokenizer, loaded.eos_ids, config)
    run_dir = RunDir.resume(path) if resume else RunDir.create(path, config)
    session = Session(config, policy, engine, roller, data, run_dir, screen, trackers, stopping, position=0)
    if resume:
        _restore(session)
    return session


def build_engine(config: Config, loaded: Loaded) -> Engine:
    """The engine of `engine.kind`. Raises ConfigError."""
    settings = config.engine
    if settings.kind != "hf":
        raise ConfigError(
            f"engine.kind is {settings.kind!r}, but this version trains with the hf engine only. No completion could be "
            "sampled. Set engine.kind = 'hf'; check the recipe without training with --dry-run."
        )
    return HFEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        seed=config.run.seed,
        max_batch=settings.max_batch,
        dtype=settings.dtype,
        own_copy=config.rollout.max_staleness > 0,
    )


def _restore(session: Session) -> None:
    """Go on from the last checkpoint as if nothing had happened."""
    run_dir = session.run_dir
    session.evaluations = {
        step: Evaluation(tuple(rewards), metrics)
        for step, rewards, metrics in read_evaluations(run_dir.path / "evaluations.jsonl")
    }
    latest = run_dir.latest_checkpoint()
    if latest is None:
        return
    _, directory = latest
    session.policy.restore(directory)
    session.position = json.loads((directory / POSITION).read_text())["position"]
    session.data.train.seek(session.position)
    session.rows = read_metrics(run_dir.path / "metrics.jsonl")
