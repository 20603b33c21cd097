"""The trained model: its logprobs, its update, its frozen reference, its version."""

import contextlib
import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from leadline.config import Config
from leadline.errors import ModelError, TrainingError
from leadline.models import Loaded, adapter_weights, is_lora, merged_weights, save_model
from leadline.objective.losses import entropy_threshold
from leadline.policy.batch import Batch, Minibatch, micro_batches, minibatches, pack
from leadline.policy.heads import ModelHead
from leadline.policy.kernel_caches import bound_kernel_caches
from leadline.policy.memory import Budget
from leadline.policy.optimizer import Optimizer, Outcome, learning_rate
from leadline.policy.profile import Stopwatch
from leadline.policy.scoring import score_rows
from leadline.policy.self_check import take_fast_paths
from leadline.policy.step_loss import Before, Scores, Terms, TokenRecord, loss_shares, step_loss
from leadline.policy.update_metrics import OptimizerStep, Update, summarize
from leadline.types import Weights


class Policy:
    """The model that is trained, with its optimizer and its frozen reference."""

    def __init__(self, loaded: Loaded, config: Config) -> None:
        bound_kernel_caches()
        self.config = config
        self.loaded = loaded
        self.model: nn.Module = loaded.model
        self.version = 0
        self.discarded_in_a_row = 0
        self.reference = self._frozen_copy() if config.objective.beta > 0 and not config.model.lora_rank else None
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.check_frozen()
        self.packs = False
        """Whether completions share their prompts within a row."""
        self.head: ModelHead | None = None
        """Where logits are computed a chunk at a time; None = the model's whole logits."""
        self.reference_head: ModelHead | None = None
        self.budget = Budget(config.optimizer)
        self.stopwatch = Stopwatch(self.device)
        self.slow_paths = take_fast_paths(self)
        """What the model does not take, a line each."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # ---- logprobs

    def logprobs(self, batch: Batch, completions: Sequence[int], *, reference: bool = False) -> Scores:
        """log pi of each token of these completions, in their order, of the distribution that was sampled."""
        rows = [pack(batch, row) for row in ([completions] if self.packs else [[c] for c in completions])]
        if not reference:
            return score_rows(self.model, self.head, batch, rows, self.config, packs=self.packs)
        if self.reference is not None:
            return score_rows(self.reference, self.reference_head, batch, rows, self.config, packs=self.packs)
        with self.model.disable_adapter():  # type: ignore[operator]
            return score_rows(self.model, self.head, batch, rows, self.config, packs=self.packs)

    # ---- update

    def update(self, batch: Batch) -> Update:
        """Train on the batch: `epochs_per_batch` x `minibatches` optimizer steps. Raises the version by 1."""
        settings = self.config.optimizer
        started = time.perf_counter()
        before = self.budget.spend(partial(self._score_before, batch), undo=self.optimizer.forget)
        scored = time.perf_counter()
        rate = learning_rate(settings, self.version, self.config.run.steps)
        with _recomputing(self.model, self.config.model.gradient_checkpointing):
            steps = [
                self._optimizer_step(batch, minibatch, before, rate)
                for _ in range(settings.epochs_per_batch)
                for minibatch in minibatches(batch, settings.minibatches)
            ]
        self.version += 1
        timings = {"score": scored - started, "update": time.perf_counter() - scored}
        update = summarize(batch, steps, self.config, rate, timings)
        update.metrics.update(self.stopwatch.metrics())
        return update

    def rehearse(self, batch: Batch) -> Update:
        """What an update would measure of its first epoch if no optimizer step were taken, and none is: weights, optimizer and
        version stay as they are."""
        before = self.budget.spend(partial(self._score_before, batch), undo=self.optimizer.forget)
        with _recomputing(self.model, self.config.model.gradient_checkpointing):
            parts = minibatches(batch, self.config.optimizer.minibatches)
            steps = [self._rehearsed(batch, part, before) for part in parts] * self.config.optimizer.epochs_per_batch
        self.stopwatch.metrics()  # what it has counted belongs to no step
        return summarize(batch, steps, self.config, 0.0, {})

    def _rehearsed(self, batch: Batch, minibatch: Minibatch, before: Before) -> OptimizerStep:
        gradients = partial(self._add_gradients, batch, minibatch, before)
        terms, records = self.budget.spend(gradients, undo=self.optimizer.forget)
        norm = float(self.optimizer.gradient_norm())
        self.optimizer.forget()
        if not records:
            return OptimizerStep(terms, None, None)
        discarded = not (math.isfinite(terms.total) and math.isfinite(norm))
        clipped = math.nan if discarded else min(norm, self.config.optimizer.max_grad_norm)
        return OptimizerStep(terms, TokenRecord.concatenate(records), Outcome(discarded, norm, clipped, 0.0))

    def _score_before(self, batch: Batch) -> Before:
        """Old and reference logprobs, each only where they can differ from what the update computes anyway."""
        several = self.config.optimizer.optimizer_steps > 1
        old = self._score_all(batch, reference=False) if several else None
        ref = self._score_all(batch, reference=True) if self.config.objective.beta > 0 else None
        return Before(old.logprobs if old else None, ref.logprobs if ref else None)

    def _score_all(self, batch: Batch, *, reference: bool) -> Scores:
        return self._score(batch, list(minibatches(batch, self.config.optimizer.minibatches)), reference=reference)

    @torch.no_grad()
    def _score(self, batch: Batch, parts: Sequence[Minibatch], *, reference: bool) -> Scores:
        """NaN outside the parts. Packed as for training: a model that has not moved gives the same numbers again."""
        logprobs = torch.full((len(batch.token_ids),), torch.nan)
        entropies = torch.full((len(batch.token_ids),), torch.nan)
        for part in parts:
            for micro in micro_batches(batch, part.forwarded, self.budget.tokens):
                scores = self.logprobs(batch, micro, reference=reference)
                tokens = batch.tokens_of(micro)
                logprobs[tokens], entropies[tokens] = scores.logprobs.cpu(), scores.entropies.cpu()
        return Scores(logprobs, entropies)

    def _with_threshold(self, batch: Batch, minibatch: Minibatch, before: Before) -> Before:
        """With the entropy below which tokens of this optimizer step are not trained (Wang et al. 2025: of the batch that
        the step is taken on, by the policy that takes it)."""
        quantile = self.config.objective.entropy_quantile
        if quantile == 0:
            return before
        entropies = self._score(batch, [minibatch], reference=False).entropies
        threshold = entropy_threshold(entropies, batch.loss_mask & ~entropies.isnan(), quantile)
        return replace(before, entropy_threshold=float(threshold))

    def _optimizer_step(self, batch: Batch, minibatch: Minibatch, before: Before, rate: float) -> OptimizerStep:
        gradients = partial(self._add_gradients, batch, minibatch, before)
        terms, records = self.budget.spend(gradients, undo=self.optimizer.forget)
        if not records:
            return OptimizerStep(terms, None, None)
        with self.stopwatch("optimizer"):
            outcome = self.optimizer.step(terms.total, rate)
        self.discarded_in_a_row = self.discarded_in_a_row + 1 if outcome.discarded else 0
        return OptimizerStep(terms, TokenRecord.concatenate(records), outcome)

    def _add_gradients(self, batch: Batch, minibatch: Minibatch, before: Before) -> tuple[Terms, list[TokenRecord]]:
        """Forward and backward, micro-batch by micro-batch."""
        shares = loss_shares(batch, minibatch, self.config)
        before = self._with_threshold(batch, minibatch, before)
        terms, records = Terms(), []
        for micro in micro_batches(batch, minibatch.forwarded, self.budget.tokens):
            with self.stopwatch("forward"):
                scores = self.logprobs(batch, micro)
                loss, micro_terms, record = step_loss(self.config.objective, batch, micro, scores, before, shares)
            with self.stopwatch("backward"):
                loss.backward()
                self.optimizer.collect()
            terms += micro_terms
            records.append(record)
        return terms, records

    # ---- weights, reference, checkpoints

    def weights(self) -> Weights:
        """The weights to sample from, by their Hugging Face names; an adapter is merged into a copy. Checks them.

        With `engine.lora = "push"` the adapter alone, which the engine lays over the base that it has.
        """
        self.check_finite()
        return adapter_weights(self.model) if self.config.engine.lora == "push" else merged_weights(self.model)

    def check_frozen(self) -> None:
        """Raise TrainingError if the reference could drift with the policy, ModelError if nothing is trained."""
        trained = {id(p) for p in self.optimizer.parameters}
        if not trained:
            raise ModelError(
                f"model.name is {self.config.model.name!r}, but none of its weights can be trained. Every step would "
                "be empty. Check the adapter settings, and that the weights are not quantised."
            )
        storages = {p.untyped_storage().data_ptr() for p in self.optimizer.parameters}
        for name, p in self._reference_parameters():
            if p.requires_grad or id(p) in trained or p.untyped_storage().data_ptr() in storages:
                raise TrainingError(
                    f"objective.beta is {self.config.objective.beta}, but the reference's {name} is trained too. The "
                    "reference would drift with the policy and the KL stay near 0. Report this as a bug."
                )

    def check_finite(self) -> None:
        """Raise TrainingError if a weight is not finite: such weights are never saved or sent to an engine."""
        for name, p in self.model.named_parameters():
            if p.requires_grad and not bool(torch.isfinite(p).all()):
                raise TrainingError(
                    f"The policy's {name} is not finite at version {self.version}, but weights are numbers. An engine "
                    "would sample noise. Lower optimizer.learning_rate and resume from the last checkpoint; if there "
                    "was no step yet, the model itself is broken."
                )

    def save(self, directory: Path) -> None:
        """`model/`, a Hugging Face directory, and `trainer.pt`, what a resumed run needs besides. Checks both first."""
        self.check_frozen()
        self.check_finite()
        save_model(self.model, self.loaded.tokenizer, directory / "model")
        state = {"version": self.version, "discarded_in_a_row": self.discarded_in_a_row}
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, directory / "trainer.pt")

    def restore(self, directory: Path) -> None:
        """Go on exactly from what `save` wrote."""
        load_weights(self.model, directory / "model", self.config.model.trust_remote_code)
        state = torch.load(directory / "trainer.pt", weights_only=True, map_location=self.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.discarded_in_a_row = state["version"], state["discarded_in_a_row"]

    def _reference_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the frozen copy, or of the base under the adapter, frozen whether or not there is a KL term."""
        if self.reference is not None:
            yield from self.reference.named_parameters()
        elif is_lora(self.model):
            yield from ((name, p) for name, p in self.model.named_parameters() if ".lora_" not in name)

    def _frozen_copy(self) -> nn.Module:
        return copy.deepcopy(self.model).requires_grad_(False).eval()


@contextlib.contextmanager
def _recomputing(model: nn.Module, on: bool) -> Iterator[None]:
    """Transformers recomputes activations in training mode only. Without dropout that mode changes nothing else."""
    model.train(on)
    try:
        yield
    finally:
        model.eval()


def load_weights(model: nn.Module, directory: Path, trust_remote_code: bool) -> None:
    """Put the weights that `save_model` wrote into the model, in place."""
    if is_lora(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(str(directory / "adapter"), device="cpu"))
        return
    dtype = next(model.parameters()).dtype
    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=trust_remote_code)
    model.load_state_dict(saved.state_dict())
