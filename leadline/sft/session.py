"""Supervised fine-tuning, from recipe to model: the policy's own update on demonstrations instead of rollouts.

    demonstrations -> pack -> logprobs -> mean of -log pi -> guard -> optimizer -> record

loss = -1/N sum log pi(token | before it), over all N completion tokens of the step. What a step trains on is a function
of (seed, step), so a resumed run repeats an uninterrupted one to the last digit.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from leadline.compute import computed, computes
from leadline.config import Config
from leadline.data import PromptData
from leadline.errors import TrainingError
from leadline.evaluate import evaluate
from leadline.models import load_model
from leadline.policy.batch import Batch, micro_batches
from leadline.policy.policy import Policy
from leadline.policy.update_metrics import Update
from leadline.rewards.scorer import build_scorer
from leadline.rollouts import Roller
from leadline.run_dir import RunDir, read_evaluations, read_metrics
from leadline.screen import Screen
from leadline.session import build_engine, check_same_run
from leadline.sft.config import SftConfig, parse_sft_config
from leadline.sft.data import Writer, demonstration_batch, load_demonstrations, make_writer
from leadline.trackers import Tracker, open_trackers
from leadline.train import check_discarded
from leadline.types import Prompt

KEPT = re.compile(
    r"model\.(name|tokenizer|dtype|lora_\w+|add_special_tokens|chat_template_kwargs)|(data|sft)\..+|rewards|eval\.prompts|run\.seed"
)
"""Settings that a resumed run keeps."""

SHOWN = re.compile(r"loss|optimizer/.+|policy/(entropy|tokens)|time/.+|throughput/trained_tokens_per_s|memory/.+")
"""Of an update's metrics: those that mean something without rollouts."""

OF_ROLLOUTS = {"rollout_logprobs", "staleness", "rewards", "advantages", "lost_at", "seen_log_ratio", "seen_weights"}
"""Of a black box: tensors that mean nothing where nobody has sampled; a reader would take them for measured."""


@dataclass(slots=True)
class SftSession:
    """The parts of a fine-tuning run, and what it has measured so far."""

    config: SftConfig
    trainer_config: Config
    """The same as the policy knows it."""
    policy: Policy
    roller: Roller
    writer: Writer
    data: PromptData
    run_dir: RunDir
    screen: Screen
    trackers: list[Tracker]
    stopping: Callable[[], bool]
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by step; 0 is before the first."""

    async def run(self) -> None:
        """Evaluate, train, evaluate. Raises TrainingError."""
        try:
            await self._evaluate()
            await self._train()
            if not self.stopping():
                await self._evaluate()
        finally:
            await self.roller.engine.close()
            for tracker in self.trackers:
                tracker.close()

    @property
    def finished(self) -> bool:
        """Every step is made, and the last evaluation too."""
        return self.policy.version >= self.config.run.steps and not self._evaluation_is_due()

    async def _train(self) -> None:
        every = self.config.run.checkpoint_every
        try:
            while self.policy.version < self.config.run.steps and not self.stopping():
                await computed(self._step)
                if every and self.policy.version % every == 0:
                    await computed(self._checkpoint)
                check_discarded(self.policy, self.trainer_config)
                if self.policy.version < self.config.run.steps:  # the last evaluation comes after the last checkpoint
                    await self._evaluate()
        except TrainingError:
            await computed(self._checkpoint)
            raise
        await computed(self._checkpoint)

    def _step(self) -> None:
        """One optimizer step on the next demonstrations, written down."""
        started = time.perf_counter()
        self.screen.stage("update")
        count, position = self.config.sft.demonstrations_per_step, self.policy.version
        prompts = [self.data.train.prompt(position * count + i) for i in range(count)]
        update = self.policy.update(demonstration_batch(prompts, self.writer, self.trainer_config))
        step = self.policy.version
        metrics = {"step": float(step), "data/epoch": step * count / len(self.data.train)}
        metrics |= {name: value for name, value in update.metrics.items() if SHOWN.fullmatch(name)}
        metrics["time/step_s"] = time.perf_counter() - started
        self._record(step, prompts, update, metrics)

    def _record(self, step: int, prompts: Sequence[Prompt], update: Update, metrics: dict[str, float]) -> None:
        self.run_dir.write_metrics(metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)
        if update.discarded:
            self.screen.message(
                f"step {step} is discarded: its loss or gradient is not finite. The weights are as before; the tokens are "
                f"in blackbox/."
            )
        info = {"discarded": update.discarded, "prompts": [prompt.text for prompt in prompts]}
        tensors = {name: tensor for name, tensor in update.blackbox.items() if name not in OF_ROLLOUTS}
        self.run_dir.write_blackbox(step, tensors, info, keep=update.discarded)
        self.screen.show(metrics, [])

    def _evaluation_is_due(self) -> bool:
        step, every = self.policy.version, self.config.eval.every
        at_its_time = step in (0, self.config.run.steps) or (every and step % every == 0)
        return bool(self.data.held_out and at_its_time and step not in self.evaluations)

    async def _evaluate(self) -> None:
        """On the held-out demonstrations, if it is time to and was not done at this step."""
        step, greedy = self.policy.version, self.config.sft.greedy_prompts
        if not self._evaluation_is_due():
            return
        self.screen.stage("evaluate")
        batch = await computed(demonstration_batch, self.data.held_out, self.writer, self.trainer_config)
        metrics = await computed(held_out_metrics, self.policy, batch, self.trainer_config)
        rewards: tuple[float, ...] = ()
        if greedy:
            await self.roller.engine.load_weights(await computed(self.policy.weights), step)
            sampled = await evaluate(self.roller, self.data.held_out[:greedy], self.trainer_config)
            rewards, metrics = sampled.rewards, metrics | sampled.metrics
        self.evaluations[step] = metrics
        self.run_dir.write_evaluation(step, rewards, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self.screen.show({"step": float(step), **metrics}, [])

    def _checkpoint(self) -> None:
        if self.policy.version > 0:
            self.run_dir.save_checkpoint(self.policy.version, self.policy.save)


@torch.no_grad()
def held_out_metrics(policy: Policy, batch: Batch, config: Config) -> dict[str, float]:
    """Mean -log pi over the batch's tokens, in nats, and its exponential; the batch is not trained on."""
    total = 0.0
    for micro in micro_batches(batch, batch.forwarded, config.optimizer.first_tokens_per_micro):
        total -= float(policy.logprobs(batch, micro).logprobs.double().sum())
    loss = total / len(batch.token_ids)
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/tokens": float(len(batch.token_ids)),
    }


@computes
def open_sft_session(
    config: SftConfig, path: Path, *, resume: bool, stopping: Callable[[], bool], screen: Screen
) -> SftSession:
    """Everything a run needs, checked: before this returns nothing is written.

    Raises ConfigError, ModelError, DataError, RewardError, RunDirError.
    """
    if resume:
        check_same_run(RunDir.open(path, parse_sft_config).config, config, KEPT)
    else:
        RunDir.check_free(path)
    trainer_config = config.policy_config()
    scorer = build_scorer(trainer_config.rewards, trainer_config.decoding)
    screen.stage("load model")
    disable_progress_bar()
    loaded = load_model(config.model, config.run.seed)
    writer = make_writer(loaded.tokenizer, loaded.eos_ids, config.data)
    data = load_demonstrations(config, writer, context_length=loaded.context_length)
    scorer.check_columns(data.columns)
    policy = Policy(loaded, trainer_config)
    for line in policy.slow_paths:
        screen.message(f"model.name is {config.model.name!r}. {line}")
    engine = build_engine(trainer_config, loaded, path, screen.message)
    roller = Roller(engine, scorer, loaded.tokenizer, loaded.eos_ids, trainer_config)
    trackers = open_trackers(config.run.trackers, path, config)
    run_dir = RunDir.resume(path, parse_sft_config) if resume else RunDir.create(path, config)
    session = SftSession(config, trainer_config, policy, roller, writer, data, run_dir, screen, trackers, stopping)
    if resume:
        run_dir.adopt(config)
        _restore(session)
    return session


def _restore(session: SftSession) -> None:
    """Go on from the last checkpoint as if nothing had happened."""
    path = session.run_dir.path
    session.evaluations = {step: metrics for step, _, _, metrics in read_evaluations(path / "evaluations.jsonl")}
    session.screen.restore([{"step": step, **metrics} for step, metrics in session.evaluations.items()])
    if latest := session.run_dir.latest_checkpoint():
        session.policy.restore(latest[1])
        session.screen.restore(read_metrics(path / "metrics.jsonl"))
