import copy
import io
import math
import sys

import pytest
import torch
from torch import Tensor, nn

from leadline.errors import ConfigError
from leadline.policy.optimizer import Optimizer, learning_rate
from leadline.settings.optimizer import Optimizer as OptimizerSettings


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A matrix, a vector, and a matrix that stays out of the gradient."""
    generator = torch.Generator().manual_seed(0)
    made = nn.Module()
    for name, shape in {"matrix": (4, 3), "vector": (3,), "unused": (2, 2)}.items():
        setattr(made, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    return made


def settings(**values: float | str | int) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"learning_rate": 0.1, "max_grad_norm": 1e9, **values})


def give_gradients(made: nn.Module, seed: int = 1, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in (made.matrix, made.vector):
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def values(made: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in made.parameters()])


@pytest.mark.parametrize(
    ("schedule", "warmup", "step", "expected"),
    [
        ("constant", 0, 0, 1.0),
        ("constant", 0, 9, 1.0),
        ("constant", 3, 0, 0.25),  # the first step already moves
        ("constant", 3, 2, 0.75),
        ("constant", 3, 3, 1.0),
        ("linear", 0, 0, 1.0),
        ("linear", 0, 5, 0.5),
        ("linear", 0, 9, 0.1),  # 0 only after the last step
        ("linear", 2, 6, 0.5),
        ("linear", 0, 12, 0.0),  # a run that was extended does not climb the gradient
        ("cosine", 0, 5, 0.5),
        ("cosine", 0, 0, 1.0),
        ("cosine", 0, 12, 0.0),
        ("cosine", 2, 6, 0.5),
    ],
)
def test_learning_rate_warms_up_and_falls(schedule: str, warmup: int, step: int, expected: float) -> None:
    made = settings(learning_rate=2.0, schedule=schedule, warmup_steps=warmup)
    assert learning_rate(made, step, 10) == pytest.approx(2.0 * expected, abs=1e-12)


def test_steps_equal_those_of_plain_adamw() -> None:
    made, plain = module(), module()
    ours = Optimizer(made, settings(weight_decay=0.1))
    theirs = torch.optim.AdamW(
        [{"params": [plain.matrix], "weight_decay": 0.1}, {"params": [plain.vector], "weight_decay": 0.0}], lr=0.1
    )
    for seed in range(3):
        give_gradients(made, seed)
        give_gradients(plain, seed)
        ours.step(0.0, 0.1)
        theirs.step()
    assert torch.allclose(values(made), values(plain), rtol=0, atol=1e-6)  # fused and not: a few roundings apart


def test_weight_decay_is_of_matrices_only() -> None:
    made = module()
    before = copy.deepcopy(made)
    made.matrix.grad, made.vector.grad = torch.full((4, 3), 1e-10), torch.zeros(3)
    Optimizer(made, settings(weight_decay=0.5, eps=1.0)).step(0.0, 0.1)
    assert torch.allclose(made.matrix, before.matrix * (1 - 0.1 * 0.5))
    assert torch.equal(made.vector, before.vector)


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    for limit, clipped in ((0.5, 0.5), (100.0, None)):
        made = module()
        give_gradients(made)
        norm = float(torch.cat([made.matrix.grad.flatten(), made.vector.grad]).norm())
        outcome = Optimizer(made, settings(max_grad_norm=limit)).step(0.0, 0.1)
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-6)
        assert outcome.grad_norm_clipped == pytest.approx(clipped or norm, rel=1e-6)


def test_clipping_acts_on_the_step() -> None:
    # With a large eps AdamW's first step is -rate * g / eps: linear in the gradient that it was given.
    made = module()
    before = values(made)
    give_gradients(made)
    Optimizer(made, settings(max_grad_norm=0.5, eps=1e6)).step(0.0, 1e6)
    assert float((values(made) - before).norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_update_norm_is_the_measured_change_of_the_weights(weight_decay: float) -> None:
    made = module()
    ours = Optimizer(made, settings(weight_decay=weight_decay))
    for seed in range(4):
        before = values(made)
        give_gradients(made, seed)
        outcome = ours.step(0.0, 1e-3)
        after = values(made)
        assert outcome.update_norm == pytest.approx(float((after - before).norm() / after.norm()), rel=2e-3)


def test_update_norm_leaves_out_what_got_no_gradient_this_time() -> None:
    made = module()
    ours = Optimizer(made, settings())
    give_gradients(made)
    ours.step(0.0, 0.1)
    before = values(made)
    made.vector.grad = torch.ones(3)
    outcome = ours.step(0.0, 0.1)
    after = values(made)
    assert outcome.update_norm == pytest.approx(float((after - before).norm() / after.norm()), rel=1e-4)


def test_a_rate_of_zero_moves_nothing_and_says_so() -> None:
    made = module()
    before = values(made)
    give_gradients(made)
    outcome = Optimizer(made, settings()).step(0.0, 0.0)
    assert torch.equal(values(made), before)
    assert outcome.update_norm == 0


def test_a_step_without_any_gradient_moves_nothing_whatever_came_before() -> None:
    # AdamW remembers: with a gradient of zeros it would go on in the old direction, and decay the matrices.
    made = module()
    ours = Optimizer(made, settings(weight_decay=0.5))
    give_gradients(made)
    assert ours.step(0.0, 0.1).taken
    before, state = values(made), copy.deepcopy(ours.state_dict())
    give_gradients(made, scale=0.0)
    outcome = ours.step(0.0, 0.1)
    assert not outcome.taken
    assert not outcome.discarded
    assert (outcome.grad_norm, outcome.grad_norm_clipped, outcome.update_norm) == (0, 0, 0)
    assert torch.equal(values(made), before)
    assert equal_states(ours.state_dict(), state)
    assert all(p.grad is None for p in made.parameters())


def test_moments_in_8_bits_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"optimizer\.moments is '8bit', but torchao cannot be imported"):
        Optimizer(module(), settings(moments="8bit"))


@pytest.mark.filterwarnings("ignore")  # of the compiler that torchao's step goes through
def test_moments_in_8_bits_step_almost_as_in_32() -> None:
    pytest.importorskip("torchao.optim", reason="torchao is optional")
    made, plain = (nn.Linear(64, 128, bias=False) for _ in range(2))
    plain.load_state_dict(made.state_dict())
    before = made.weight.detach().clone()
    steps, norms = [Optimizer(made, settings(moments="8bit")), Optimizer(plain, settings())], list[float]()
    for seed in range(3):
        for each, optimizer in zip((made, plain), steps, strict=True):
            each.weight.grad = torch.randn(each.weight.shape, generator=torch.Generator().manual_seed(seed))
            norms.append(optimizer.step(0.0, 1e-3).update_norm)
    assert float((made.weight - plain.weight).norm()) < 0.15 * float((plain.weight - before).norm())
    assert norms[-2] == pytest.approx(norms[-1], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "gradient"),
    [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (0.0, math.nan), (0.0, math.inf), (0.0, -math.inf)],
)
def test_a_step_that_is_not_finite_leaves_no_trace(dtype: torch.dtype, loss: float, gradient: float) -> None:
    made = module(dtype)
    ours = Optimizer(made, settings())
    give_gradients(made)
    ours.step(0.0, 0.1)
    before, state = values(made), copy.deepcopy(ours.state_dict())
    give_gradients(made)
    made.matrix.grad[1, 1] = gradient
    outcome = ours.step(loss, 0.1)
    assert outcome.discarded
    assert outcome.update_norm == 0
    assert torch.equal(values(made), before)
    assert equal_states(ours.state_dict(), state)
    assert all(p.grad is None for p in made.parameters())
    # ... and the next step is as if the discarded one had never been.
    twin = module(dtype)
    theirs = Optimizer(twin, settings())
    for seed in (1, 5):
        give_gradients(twin, seed)
        theirs.step(0.0, 0.1)
    give_gradients(made, 5)
    assert not ours.step(0.0, 0.1).discarded
    assert torch.equal(values(made), values(twin))


def equal_states(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_states, one, other))
    return one == other


def test_a_tiny_update_of_bfloat16_weights_survives_many_steps() -> None:
    # 1e-6 of a weight of 1 is far below what bfloat16 resolves (2^-8): without masters nothing would ever move.
    made = nn.Module()
    made.matrix = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    ours = Optimizer(made, settings())
    for step in range(4500):
        made.matrix.grad = torch.ones(4, 4, dtype=torch.bfloat16)
        outcome = ours.step(0.0, 1e-6)
        if step == 0:
            assert torch.equal(made.matrix, torch.ones(4, 4, dtype=torch.bfloat16))
            assert outcome.update_norm == pytest.approx(1e-6, rel=1e-3)  # of the masters: it is not lost
    assert made.matrix.eq(1 - 2**-8).all()  # 0.9955 to the nearest bfloat16


def test_many_small_gradients_in_bfloat16_add_up() -> None:
    # 1 + 400 * 2^-9 = 1.78. Summed in bfloat16 every one of the small parts would round away.
    made = nn.Module()
    made.matrix = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    ours = Optimizer(made, settings())
    for part in (1.0, *[2**-9] * 400):
        made.matrix.grad = torch.full((1, 1), part, dtype=torch.bfloat16)
        ours.collect()
    assert ours.step(0.0, 0.1).grad_norm == pytest.approx(1 + 400 / 512, rel=1e-6)


def test_collecting_does_nothing_to_float32_gradients() -> None:
    made = module()
    ours = Optimizer(made, settings())
    give_gradients(made)
    expected = made.matrix.grad.clone()
    ours.collect()
    ours.collect()
    assert torch.equal(made.matrix.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_went_through_a_file_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    made = module(dtype)
    ours = Optimizer(made, settings())
    for seed in range(3):
        give_gradients(made, seed)
        ours.step(0.0, 0.01)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(made)
    theirs = Optimizer(twin, settings())
    theirs.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3, 6):
        for each, optimizer in ((made, ours), (twin, theirs)):
            give_gradients(each, seed)
            optimizer.step(0.0, 0.01)
    assert torch.equal(values(made), values(twin))
    assert equal_states(ours.state_dict(), theirs.state_dict())


def test_frozen_parameters_are_not_optimized() -> None:
    made = module()
    made.unused.requires_grad_(False)
    assert [id(p) for p in Optimizer(made, settings()).parameters] == [id(made.matrix), id(made.vector)]
