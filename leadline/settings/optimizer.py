"""AdamW and its schedule."""

from typing import Annotated, Literal

from pydantic import Field

from leadline.settings.section import Section


class Optimizer(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. RL wants 1e-7 to 5e-6 for billions of weights, more for a tiny model or LoRA."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to 0 at `run.steps`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    moments: Literal["float32", "8bit"] = "float32"
    """AdamW: how both moments are kept. `8bit` needs torchao, and 2 instead of 8 bytes a weight."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of biases and norms)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    epochs_per_batch: int = Field(1, ge=1)
    """Passes over the groups of a step."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass; groups are split evenly."""
    tokens_per_micro: Annotated[int, Field(ge=16)] | Literal["auto"] = 4096
    """Most tokens (prompts included) in one forward and backward. Never changes the result beyond rounding. `auto`: as many
    as fit into the memory that is free at the start, and half of them whenever it runs out (`leadline train` only)."""
    max_discarded_steps: int = Field(3, ge=1)
    """So many discarded optimizer steps in a row stop the run."""

    @property
    def first_tokens_per_micro(self) -> int:
        """The budget as set; where it is automatic, what to begin with until the memory is known."""
        return 4096 if self.tokens_per_micro == "auto" else self.tokens_per_micro

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in one `policy.update`."""
        return self.epochs_per_batch * self.minibatches
