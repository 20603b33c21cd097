"""TRL's GRPOTrainer, driven part by part.

Three configurations. As shipped: its defaults on this machine. Compact: only completion positions go through the head, as
TRL does on CUDA (on a CPU it scores prompts and padding too). At its best: compact, without gradient checkpointing, and in
bfloat16 with weights of that dtype instead of autocast over float32 ones. The synchronous trainer has no packing.

It computes on leadline's thread: a second OpenMP team in the process would slow both sides down.

Whatever TRL's outer loop adds to a step (callbacks, logging, the learning-rate schedule) is left out, in its favour.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_compare.cells import MODEL, Cell
from benchmarks.trl_compare.forced_lengths import ForcedLengths
from leadline.compute import computes
from leadline.model_sources import read_model, read_tokenizer
from leadline.settings.model import Model

SEQUENCES = 8
"""TRL's default batch of one device. A larger group is split: its memory does not grow, nor does its time per sequence."""

_scores_as_shipped = trl_utils._use_triton


class Trl:
    """One trainer in one configuration, on one cell."""

    @computes
    def __init__(
        self,
        cell: Cell,
        *,
        compact: bool = False,
        best: bool = False,
        model: str = MODEL,
        sharing: "Trl | None" = None,
    ) -> None:
        """`sharing`: another configuration whose model and optimizer are used too, if the dtype allows."""
        self.compact, self.best = compact, best
        autocast = cell.dtype == "bfloat16" and not best
        settings = Model(name=model, device="cpu", dtype=cell.dtype if best else "float32")
        shared = sharing is not None and sharing.dtype == settings.dtype
        self.dtype = settings.dtype
        tokenizer = read_tokenizer(settings)
        policy = sharing.trainer.model if shared else read_model(settings, 0)
        self.micro = min(cell.group, SEQUENCES)
        self.trainer: Any = GRPOTrainer(
            model=policy,
            reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                per_device_train_batch_size=self.micro,
                gradient_accumulation_steps=cell.group // self.micro,
                num_generations=cell.group,
                max_completion_length=cell.longest,
                gradient_checkpointing=not best,
                bf16=autocast,
                use_cpu=True,
                learning_rate=1e-6,
                report_to=[],
                save_strategy="no",
                max_steps=10**6,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["0"] * 64}),
            processing_class=tokenizer,
        )
        if shared:
            self.trainer.optimizer = sharing.trainer.optimizer
        else:
            self.trainer.create_optimizer()
            self._force_lengths(policy)
        self.trainer.current_gradient_accumulation_steps = cell.group // self.micro
        self.trainer._tokenize_prompts = lambda prompts: ([list(self.cell.prompt_ids()) for _ in prompts], None, {})
        self.eos = tokenizer.eos_token_id
        self.after_backward: Callable[[], None] = lambda: None
        self.use(cell)

    def use(self, cell: Cell) -> None:
        """From now on the work is this cell's; group size and dtype are those of the first."""
        self.cell = cell

    def _force_lengths(self, model: Any) -> None:
        generate = model.generate

        def forced(**inputs: Any) -> Any:
            prompt = inputs["input_ids"].shape[1]
            return generate(**inputs, logits_processor=[ForcedLengths(self.cell.lengths(), self.eos, prompt)])

        model.generate = forced

    def configure(self) -> None:
        """To be called before a part runs: the two configurations may share a model."""
        model = self.trainer.model
        trl_utils._use_triton = (lambda device: True) if self.compact else _scores_as_shipped
        if self.best:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        model.train()

    @computes
    def train(self) -> None:
        """The update on given completions."""
        self.configure()
        rows = self.inputs()
        for start in range(0, self.cell.group, self.micro):
            micro = {k: v if v.ndim == 0 else v[start : start + self.micro] for k, v in rows.items()}
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer.compute_loss(self.trainer.model, micro)
            self.trainer.accelerator.backward(loss)
        self._optimizer_step()

    @computes
    def generate(self) -> None:
        """The completions of one group."""
        self.configure()
        self.trainer._generate_single_turn([list(self.cell.prompt_ids())] * self.cell.group, None, {}, self.cell.group)

    @computes
    def step(self) -> None:
        """From prompt to new weights: TRL's own training step generates when it is due."""
        self.configure()
        for _ in range(self.cell.group // self.micro):
            self.trainer.training_step(self.trainer.model, [{"prompt": "0"}] * self.cell.group, None)
        self._optimizer_step()

    def _optimizer_step(self) -> None:
        self.after_backward()
        self.trainer.accelerator.clip_grad_norm_(self.trainer.model.parameters(), self.trainer.args.max_grad_norm)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()

    def inputs(self) -> dict[str, torch.Tensor]:
        """The cell's completions as TRL batches them: right-padded, advantages by length."""
        completions = self.cell.completion_ids(self.eos)
        lengths = torch.tensor(self.cell.lengths())
        ids = torch.full((self.cell.group, self.cell.longest), self.eos)
        for row, completion in zip(ids, completions, strict=True):
            row[: len(completion)] = torch.tensor(completion)
        mask = (torch.arange(self.cell.longest) < lengths[:, None]).int()
        prompts = torch.tensor(self.cell.prompt_ids()).expand(self.cell.group, -1)
        rewards = lengths.float()
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-4),
            "num_items_in_batch": mask.sum(),
        }
