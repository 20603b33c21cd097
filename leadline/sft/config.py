"""A supervised fine-tuning run: sections that it shares with reinforcement learning, and `[sft]`.

The loss of a demonstration is -log pi of its completion: REINFORCE (Williams 1992) with advantage 1 for each. So there
is no second trainer: `policy_config` says the run in the words of the first.
"""

from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from leadline.config import SECTIONS, Config
from leadline.config_problems import contradictions, explained
from leadline.errors import ConfigError
from leadline.settings.data import Data
from leadline.settings.model import Model
from leadline.settings.objective import Objective
from leadline.settings.optimizer import Optimizer
from leadline.settings.reward import Decoding, Reward
from leadline.settings.rollout import EngineSettings, RolloutSettings, Sampling
from leadline.settings.run import Evaluation, Run
from leadline.settings.section import Section
from leadline.settings.sft import Sft

DEMONSTRATED = Reward(name="leadline.sft.data:as_demonstrated", label="as_demonstrated")
"""The reward of a greedy completion where the recipe lists none."""

MEANT = {
    "sampling": {"max_tokens", "repetition_penalty", "stop", "include_stop", "stop_token_ids"},
    "optimizer": Optimizer.model_fields.keys() - {"epochs_per_batch", "minibatches"},
    "eval": {"prompts", "every"},
    "run": {"steps", "dir", "seed", "checkpoint_every", "keep_checkpoints", "blackbox_steps", "trackers"},
}
"""Of the sections that are shared: the settings that mean something here."""


class SftConfig(Section):
    """A whole supervised fine-tuning run."""

    model: Model
    data: Data
    sft: Sft = Sft()
    rewards: tuple[Reward, ...] = Field((), strict=False)
    sampling: Sampling = Sampling()
    decoding: Decoding = Decoding()
    optimizer: Optimizer
    eval: Evaluation = Evaluation()
    run: Run = Run()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [*_meaningless(self), *_contradictions(self), *contradictions(self.policy_config())]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def policy_config(self) -> Config:
        """The same run as the policy, the data and the held-out evaluation know it."""
        return Config.model_construct(
            model=self.model,
            data=self.data,
            rewards=self.rewards or (DEMONSTRATED,),
            sampling=self.sampling,
            decoding=self.decoding if self.rewards else Decoding(strip_reasoning=False),
            engine=EngineSettings(),
            rollout=RolloutSettings(),
            objective=Objective(loss="reinforce", aggregation="token_mean", importance_action="off"),
            optimizer=self.optimizer,
            eval=self.eval.model_copy(update={"temperature": 0.0}),
            run=self.run,
        )


AnyConfig = Config | SftConfig
"""What a run directory may hold."""

SFT_SECTIONS: dict[str, type[Section]] = {name: SECTIONS.get(name, Sft) for name in SftConfig.model_fields}


def parse_sft_config(values: dict[str, Any]) -> SftConfig:
    """A checked SftConfig from plain values. Raises ConfigError with one line per problem."""
    try:
        return SftConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explained(error, SFT_SECTIONS)) from error


def _meaningless(config: SftConfig) -> list[str]:
    """Settings that reinforcement learning alone reads."""
    return [
        f"{name}.{field} is {value!r}, but supervised fine-tuning has no use for it. It would be ignored. Remove it; "
        f"[{name}] has here: {', '.join(f for f in type(section).model_fields if f in MEANT[name])}."
        for name in MEANT
        for section in [getattr(config, name)]
        for field, info in type(section).model_fields.items()
        if field not in MEANT[name]
        and (value := getattr(section, field)) != info.get_default(call_default_factory=True)
    ]


def _contradictions(config: SftConfig) -> list[str]:
    greedy, held_out = config.sft.greedy_prompts, config.eval.prompts
    problems = []
    if "learning_rate" not in config.optimizer.model_fields_set:
        problems.append(
            f"optimizer.learning_rate is not set, but its default of {config.optimizer.learning_rate:g} is for reinforcement "
            "learning. Little would be learned. Set it, e.g. to 2e-5 for all weights or 2e-4 for an adapter."
        )
    if greedy > held_out:
        problems.append(
            f"sft.greedy_prompts is {greedy}, but eval.prompts is {held_out}, of which they are a part. Fewer than asked "
            "for would be completed. Raise eval.prompts."
        )
    if config.rewards and not greedy:
        problems.append(
            "rewards are listed, but sft.greedy_prompts is 0. No completion would be there to score. Set "
            "sft.greedy_prompts, or remove the rewards."
        )
    return problems
