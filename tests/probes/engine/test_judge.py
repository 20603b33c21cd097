"""When a hypothesis is believed: its effect is there, in the size that it says, beyond chance."""

import pytest
import torch

from leadline.probes.engine.causes import BY_NAME, Hypothesis, by_alignment, by_scale
from leadline.probes.engine.gap import Gap, measure_gap
from leadline.probes.engine.judge import Fit, Rounding, fit, is_noise, judge, ranked, settled

COUNT = 600


def noise(size: float, seed: int = 0) -> torch.Tensor:
    return size * torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TRAINER = -noise(1.5, seed=1).abs()
EFFECT = noise(0.3, seed=2)


def fitted(engine: torch.Tensor, predicted: torch.Tensor, cause: str = "stale_weights", chosen: bool = False) -> Fit:
    found = fit(Hypothesis(cause, "", predicted, fitted=chosen), engine, TRAINER)
    assert found is not None
    return found


def gap(engine: torch.Tensor) -> Gap:
    owner = torch.arange(COUNT) // 20
    return measure_gap(engine, TRAINER, owner, torch.arange(COUNT) % 20, None)


def test_a_true_hypothesis_explains_the_gap_and_leaves_the_noise() -> None:
    engine = TRAINER - EFFECT + noise(0.03)
    found = fitted(engine, TRAINER - EFFECT)
    assert found.fits
    assert found.explained == pytest.approx(1 - 0.01, abs=5e-3)
    assert found.slope == pytest.approx(1, abs=0.02)
    assert found.left == pytest.approx(0.03 * 0.8, rel=0.1)


def test_an_effect_of_another_size_is_another_cause() -> None:
    engine = TRAINER - EFFECT
    assert not fitted(engine, TRAINER - 2 * EFFECT).fits
    assert not fitted(engine, TRAINER - 0.5 * EFFECT).fits
    assert not fitted(engine, TRAINER - noise(0.3, seed=9)).fits


def test_a_fitted_number_must_explain_nearly_all() -> None:
    engine = TRAINER - EFFECT + noise(0.2)
    assert fitted(engine, TRAINER - EFFECT).fits
    assert not fitted(engine, TRAINER - EFFECT, chosen=True).fits


def test_tokens_without_a_number_are_left_out_and_too_few_say_nothing() -> None:
    predicted = torch.where(torch.arange(COUNT) < 9, TRAINER - EFFECT, torch.nan)
    assert fitted(TRAINER - EFFECT, predicted).tokens == 9
    assert fit(Hypothesis("bos", "", predicted[:7].repeat(1)), (TRAINER - EFFECT)[:7], TRAINER[:7]) is None


def test_of_equals_the_simpler_is_named_and_a_pair_last() -> None:
    engine = TRAINER - EFFECT
    one, other = fitted(engine, TRAINER - EFFECT, "stale_weights"), fitted(engine, TRAINER - EFFECT, "adapter_missing")
    assert [found.cause for found in ranked([one, other])] == ["adapter_missing", "stale_weights"]
    pair = fit(Hypothesis("bos", "", TRAINER - EFFECT, second="top_p"), engine, TRAINER)
    assert pair is not None
    assert ranked([pair, one])[0] is one


def test_a_gap_within_rounding_is_noise_unless_it_errs_to_one_side() -> None:
    rounding = Rounding({"bfloat16": 0.03}, accepted="bfloat16")
    assert is_noise(gap(TRAINER + noise(0.05)), rounding)
    assert not is_noise(gap(TRAINER + 0.05), rounding)
    assert not is_noise(gap(TRAINER + noise(0.05)), Rounding({"bfloat16": 0.03}, accepted="float32"))
    assert is_noise(gap(TRAINER + 5e-5), Rounding())


def test_an_unaccepted_gap_of_the_size_of_rounding_is_its_dtype() -> None:
    rounding = Rounding({"bfloat16": 0.03, "float16": 0.004})
    assert judge(gap(TRAINER + noise(0.05)), [], rounding, experts=False).cause == "dtype"
    assert "float16" in judge(gap(TRAINER + noise(0.006)), [], rounding, experts=False).detail
    assert judge(gap(TRAINER + noise(0.5)), [], rounding, experts=False).cause == "unexplained"


def test_a_gap_in_a_few_tokens_of_a_mixture_of_experts_is_routing() -> None:
    rare = torch.where(torch.arange(COUNT) % 40 == 0, noise(1.0), noise(0.01))
    rounding = Rounding({"bfloat16": 0.03})
    assert judge(gap(TRAINER + rare), [], rounding, experts=True).cause == "moe_routing"
    assert judge(gap(TRAINER + rare), [], rounding, experts=False).cause == "dtype"
    assert judge(gap(TRAINER + noise(0.04)), [], rounding, experts=True).cause == "dtype"


def test_nothing_more_is_tried_once_the_gap_is_closed() -> None:
    engine = TRAINER - EFFECT
    assert settled([fitted(engine, TRAINER - EFFECT)], Rounding())
    assert not settled([fitted(engine, TRAINER - noise(0.3, seed=9))], Rounding())
    assert not settled([], Rounding())


def test_neighbours_do_not_reach_over_the_end_of_a_completion() -> None:
    trainer, owner = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([0, 0, 1, 1])
    later, earlier = (hypothesis.predicted.tolist() for hypothesis in by_alignment(trainer, owner))
    assert later[0] == -2 and later[2] == -4 and torch.tensor([later[1], later[3]]).isnan().all()
    assert earlier[1] == -1 and earlier[3] == -3 and torch.tensor([earlier[0], earlier[2]]).isnan().all()


def test_a_logarithm_to_another_base_is_recognised() -> None:
    scaled, _ = by_scale(TRAINER / torch.log(torch.tensor(10.0)), TRAINER)
    assert "base 10" in scaled.detail


def test_every_cause_says_what_it_means_and_how_it_is_mended() -> None:
    for cause in BY_NAME.values():
        assert cause.meaning.endswith(".")
        assert bool(cause.fix) == (cause.name not in ("noise", "unexplained"))
