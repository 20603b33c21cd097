"""The trained model: its logprobs, its update, its frozen reference, its version."""

import contextlib
import copy
import inspect
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from leadline.attention import NAME, laid_out
from leadline.batch import Batch, Minibatch, Row, micro_batches, minibatches, pack, probe_batch
from leadline.config import Config
from leadline.errors import ModelError, TrainingError
from leadline.models import Loaded, is_lora, merged_weights, plain_model, save_model
from leadline.objective.logprobs import token_entropies, token_logprobs
from leadline.objective.losses import entropy_threshold
from leadline.objective.sampling import processed_logits
from leadline.optimizer import Optimizer, learning_rate
from leadline.step_loss import Before, Scores, Terms, TokenRecord, loss_shares, step_loss
from leadline.types import Weights
from leadline.update_metrics import OptimizerStep, Update, summarize


class Policy:
    """The model that is trained, with its optimizer and its frozen reference."""

    def __init__(self, loaded: Loaded, config: Config) -> None:
        self.config = config
        self.loaded = loaded
        self.model: nn.Module = loaded.model
        self.version = 0
        self.discarded_in_a_row = 0
        self.reference = self._frozen_copy() if config.objective.beta > 0 and not config.model.lora_rank else None
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.check_frozen()
        self.packs = False
        self.packing_error = self._share_prompts()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # ---- logprobs

    def logprobs(self, batch: Batch, completions: Sequence[int], *, reference: bool = False) -> Scores:
        """log pi of each token of these completions, in their order, of the distribution that was sampled."""
        rows = [completions] if self.packs else [[c] for c in completions]
        scores = [self._row_scores(batch, pack(batch, row), reference) for row in rows]
        return Scores(torch.cat([s.logprobs for s in scores]), torch.cat([s.entropies for s in scores]))

    def _row_scores(self, batch: Batch, row: Row, reference: bool) -> Scores:
        sampling = self.config.sampling
        logits = self._row_logits(row, reference)
        targets = row.token_ids.to(self.device)
        logits = processed_logits(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seen=_seen(batch, row, logits) if sampling.repetition_penalty != 1 else None,
            keep=targets,
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.objective.entropy_bonus != 0):
            entropies = token_entropies(logits)
        return Scores(token_logprobs(logits, targets), entropies)

    def _row_logits(self, row: Row, reference: bool) -> Float[Tensor, "token vocab"]:
        """Logits at the positions that predict a completion token, and at no other."""
        predicts = row.predicts.to(self.device)
        inputs: dict[str, Any] = {
            "input_ids": row.input_ids.to(self.device),
            "position_ids": row.position_ids.to(self.device),
            "use_cache": False,
        }
        model = self.reference if reference and self.reference is not None else self.model
        adapter = self.model.disable_adapter() if reference and self.reference is None else contextlib.nullcontext()  # type: ignore[operator]
        with adapter, laid_out(row.spans) if self.packs else contextlib.nullcontext():
            if _takes_logits_to_keep(model):
                return model(**inputs, logits_to_keep=predicts).logits[0]  # type: ignore[no-any-return]
            return model(**inputs).logits[0, predicts]  # type: ignore[no-any-return]

    # ---- update

    def update(self, batch: Batch) -> Update:
        """Train on the batch: `epochs_per_batch` x `minibatches` optimizer steps. Raises the version by 1."""
        settings = self.config.optimizer
        started = time.perf_counter()
        before = self._score_before(batch)
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
        return summarize(batch, steps, self.config, rate, timings)

    def _score_before(self, batch: Batch) -> Before:
        """Old and reference logprobs, each only where they can differ from what the update computes anyway."""
        objective = self.config.objective
        old = ref = None
        threshold = -torch.inf
        if self.config.optimizer.optimizer_steps > 1 or objective.entropy_quantile > 0:
            old = self._score_all(batch, reference=False)
        if objective.beta > 0:
            ref = self._score_all(batch, reference=True)
        if old is not None and objective.entropy_quantile > 0:
            forwarded = batch.loss_mask & ~old.entropies.isnan()
            threshold = float(entropy_threshold(old.entropies, forwarded, objective.entropy_quantile))
        return Before(old.logprobs if old else None, ref.logprobs if ref else None, threshold)

    @torch.no_grad()
    def _score_all(self, batch: Batch, *, reference: bool) -> Scores:
        logprobs = torch.full((len(batch.token_ids),), torch.nan)
        entropies = torch.full((len(batch.token_ids),), torch.nan)
        for micro in self._micro_batches(batch):
            scores = self.logprobs(batch, micro, reference=reference)
            tokens = batch.tokens_of(micro)
            logprobs[tokens], entropies[tokens] = scores.logprobs.cpu(), scores.entropies.cpu()
        return Scores(logprobs, entropies)

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[int, ...]]:
        """Those of the optimizer steps: packed alike, a model that has not moved gives the same numbers again."""
        settings = self.config.optimizer
        for minibatch in minibatches(batch, settings.minibatches):
            yield from micro_batches(batch, minibatch.forwarded, settings.tokens_per_micro)

    def _optimizer_step(self, batch: Batch, minibatch: Minibatch, before: Before, rate: float) -> OptimizerStep:
        shares = loss_shares(batch, minibatch, self.config)
        terms, records = Terms(), []
        for micro in micro_batches(batch, minibatch.forwarded, self.config.optimizer.tokens_per_micro):
            scores = self.logprobs(batch, micro)
            loss, micro_terms, record = step_loss(self.config.objective, batch, micro, scores, before, shares)
            loss.backward()
            self.optimizer.collect()
            terms += micro_terms
            records.append(record)
        if not records:
            return OptimizerStep(terms, None, None)
        outcome = self.optimizer.step(terms.total, rate)
        self.discarded_in_a_row = self.discarded_in_a_row + 1 if outcome.discarded else 0
        return OptimizerStep(terms, TokenRecord.concatenate(records), outcome)

    # ---- weights, reference, checkpoints

    def weights(self) -> Weights:
        """The weights to sample from, by their Hugging Face names; an adapter is merged into a copy. Checks them."""
        self.check_finite()
        return merged_weights(self.model)

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

    def _share_prompts(self) -> float:
        """Share prompts within rows if that changes nothing. The largest difference in nats on random tokens.

        The measure is each sequence alone, with the model's own attention. A model whose numbers depend on its neighbours
        in a row (recurrent state, attention that does not come from transformers' interface) keeps `packs` False: its
        sequences are forwarded one by one, which is slower and right.
        """
        plain = plain_model(self.model)
        if self.config.model.attention not in ("sdpa", "eager") or not hasattr(plain, "set_attn_implementation"):
            return math.nan
        own = plain.config._attn_implementation
        batch = probe_batch(self.model.config.vocab_size, self.config)  # type: ignore[union-attr, arg-type]
        with torch.no_grad():
            alone = self.logprobs(batch, batch.forwarded).logprobs
            self.packs = True
            self._set_attention(NAME)
            together = self.logprobs(batch, batch.forwarded).logprobs
        error = float((together - alone).abs().max())
        self.packs = error <= PACKING_TOLERANCE[next(self.model.parameters()).dtype]
        if not self.packs:
            self._set_attention(own)
        return error

    def _set_attention(self, name: str) -> None:
        for model in (self.model, self.reference):
            if model is not None:
                plain_model(model).set_attn_implementation(name)

    def save(self, directory: Path) -> None:
        """`model/`, a Hugging Face directory, and `trainer.pt`, what a resumed run needs besides. Checks both first."""
        self.check_frozen()
        self.check_finite()
        save_model(self.model, self.loaded.tokenizer, directory / "model")
        state = {"version": self.version, "discarded_in_a_row": self.discarded_in_a_row}
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, directory / "trainer.pt")

    def restore(self, directory: Path) -> None:
        """Go on exactly from what `save` wrote."""
        _load_weights(self.model, directory / "model", self.config.model.trust_remote_code)
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


PACKING_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.2, torch.float16: 0.02}
"""Nats by which a logprob in a packed row may differ from that of the sequence alone: rounding, by dtype."""


@contextlib.contextmanager
def _recomputing(model: nn.Module, on: bool) -> Iterator[None]:
    """Transformers recomputes activations in training mode only. Without dropout that mode changes nothing else."""
    model.train(on)
    try:
        yield
    finally:
        model.eval()


def _load_weights(model: nn.Module, directory: Path, trust_remote_code: bool) -> None:
    """Put the weights that `save_model` wrote into the model, in place."""
    if is_lora(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(str(directory / "adapter"), device="cpu"))
        return
    dtype = next(model.parameters()).dtype
    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=trust_remote_code)
    model.load_state_dict(saved.state_dict())


def _takes_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(plain_model(model).forward).parameters


def _seen(batch: Batch, row: Row, logits: Float[Tensor, "token vocab"]) -> Bool[Tensor, "token vocab"]:
    """For each completion token: which vocabulary entries its prompt and the completion before it hold."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    start = 0
    for piece, completion in zip(row.pieces(), row.completions, strict=True):
        rows = seen[start : start + len(piece)]
        rows[:, batch.prompt_ids[int(batch.group_of_completion[completion])]] = True
        later, earlier = torch.tril_indices(len(piece), len(piece), offset=-1)
        rows[later, piece[earlier]] = True
        start += len(piece)
    return seen.to(logits.device)
