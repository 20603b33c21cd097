"""leadline on the same work: its policy, its hf engine, and its loop with everything that a run writes down."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.trl_compare.cells import MODEL, Cell
from leadline.compute import computed, computes
from leadline.config import Config, parse_config
from leadline.engines.hf_decode import Row
from leadline.policy.batch import Batch, build_batch
from leadline.screen import Screen
from leadline.session import Session, open_session
from leadline.train import train
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout


class Leadline:
    """One session, on one cell. `decode`: dtype of the engine's copy of the weights, None = the policy's own."""

    def __init__(
        self, cell: Cell, *, decode: str | None = None, checkpointing: bool = False, model: str = MODEL
    ) -> None:
        path = Path(tempfile.mkdtemp())
        self.config = _config(model, cell, path, decode, checkpointing)
        (path / "prompts.jsonl").write_text('{"prompt": "Say more."}\n' * 64)
        self.session: Session = open_session(
            self.config, path / "run", resume=False, stopping=lambda: False, screen=Screen(self.config)
        )
        self.after_backward: Callable[[], None] = lambda: None
        self._watch_optimizer()
        self.engine: Any = self.session.engine
        self.engine._decoder._finish_reason = self._finish_reason
        self.use(cell)

    def use(self, cell: Cell) -> None:
        """From now on the work is this cell's; group size and dtype are those of the first."""
        self.cell = cell
        self.prompts = FixedPrompts(cell)
        self.batch: Batch = self._batch(min(self.session.policy.loaded.eos_ids))

    def _watch_optimizer(self) -> None:
        optimizer_step = self.session.policy.optimizer.step

        def step(*args: Any) -> Any:
            self.after_backward()
            return optimizer_step(*args)

        self.session.policy.optimizer.step = step  # type: ignore[method-assign]

    def _finish_reason(self, row: Row) -> FinishReason | None:
        """Completions of the cell's lengths, whatever is drawn."""
        return FinishReason.EOS if len(row.token_ids) == self.cell.lengths()[row.sample] else None

    def _batch(self, eos: int) -> Batch:
        def rollout(ids: tuple[int, ...]) -> Rollout:
            return Rollout(Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), FinishReason.EOS), "", reward=len(ids))

        group = Group(Prompt(0, "", self.cell.prompt_ids()), [rollout(ids) for ids in self.cell.completion_ids(eos)])
        return build_batch([group], self.config, 0)

    @computes
    def train(self) -> None:
        """The update on given completions."""
        self.session.policy.update(self.batch)

    def generate(self) -> None:
        """New weights into the engine, and the completions of one group."""

        async def run() -> None:
            await self.engine.load_weights(await computed(self.session.policy.weights), self.session.policy.version)
            await self.engine.generate(next(self.prompts), self.cell.group, self.config.sampling)

        asyncio.run(run())

    def step(self) -> None:
        """From prompt to new weights in the engine, recorded in a run directory."""
        session = self.session
        run = self.config.run.model_copy(update={"steps": session.policy.version + 1})
        session.config = self.config.model_copy(update={"run": run})
        asyncio.run(
            train(
                session.config,
                policy=session.policy,
                engine=session.engine,
                roller=session.roller,
                prompts=self.prompts,
                record=session._record,
            )
        )


class FixedPrompts:
    """An endless stream of the cell's prompt."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.position = cell, 0

    def __next__(self) -> Prompt:
        self.position += 1
        return Prompt(self.position, "Say more.", self.cell.prompt_ids())


def _config(model: str, cell: Cell, path: Path, decode: str | None, checkpointing: bool) -> Config:
    return parse_config(
        {
            "model": {
                "name": model,
                "device": "cpu",
                "dtype": cell.dtype,
                "gradient_checkpointing": checkpointing,
            },
            "data": {"source": str(path / "prompts.jsonl")},
            "rewards": [{"name": "length", "params": {"target": cell.longest}}],
            "objective": {"loss": "dapo"},
            "optimizer": {"learning_rate": 1e-6, "tokens_per_micro": 8192},
            "sampling": {"max_tokens": cell.longest},
            "rollout": {"group_size": cell.group, "groups_per_step": 1},
            "engine": {"dtype": decode},
            "eval": {"prompts": 0},
            "run": {"checkpoint_every": 0},
        }
    )
