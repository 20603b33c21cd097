import re

from leadline.config import Config
from leadline.doctor.rules import RULES
from leadline.doctor.wording import PLAIN, worded
from leadline.settings.reward import Reward


def test_an_option_of_the_framework_takes_the_place_of_ours_and_plain_words_that_of_none() -> None:
    options = {"objective.beta": "actor.kl_loss_coef"}
    text = "Lower `objective.beta` and set `objective.overlong_buffer`; see `kl/k3`."
    assert worded(text, options.get) == (
        "Lower `actor.kl_loss_coef` and set a soft penalty for the last tokens before the limit; see `kl/k3`."
    )
    assert worded("Set `objective.beta = 0.1`.", options.get) == "Set `actor.kl_loss_coef = 0.1`."


def test_every_setting_that_a_fix_names_exists_and_has_plain_words() -> None:
    named = {name for rule in RULES for name in re.findall(r"`([a-z]+\.[a-z_]+)", rule.section("Fix"))}
    for name in named - {"rewards.weight", "rewards.timeout_s", "generation_config.eos_token_id"}:
        section, field = name.split(".")
        if section not in Config.model_fields:
            continue  # an option of another framework, quoted as such
        kind = Config.model_fields[section].annotation
        assert field in kind.model_fields, name  # type: ignore[union-attr]
        assert name in PLAIN, name
    assert {"weight", "timeout_s"} <= set(Reward.model_fields)
