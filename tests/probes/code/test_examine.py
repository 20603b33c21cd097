"""How a function is understood and called, what it is compared with, and what is said when it cannot be."""

import json

import pytest
import torch
from typer.testing import CliRunner

from leadline.errors import ConfigError
from leadline.objective.advantages import group_advantages
from leadline.objective.importance import rollout_weights
from leadline.objective.kl import kl_divergence
from leadline.objective.logprobs import token_logprobs
from leadline.objective.losses import policy_loss
from leadline.probes.code import loss
from leadline.probes.code.batch import seeded_batches
from leadline.probes.code.binding import bind
from leadline.probes.code.examine import examine
from leadline.probes.code.load import load_function
from leadline.probes.code.search import Variant
from leadline.probes.code.words import quantity_of
from leadline.probes.command import probe
from tests.probes.code.planted_losses import surrogate, token_mean


@pytest.mark.parametrize(
    ("function", "role", "given", "matches"),
    [
        *(
            (policy_loss, "loss", [f"name={name}"], f"{same} (one loss a token")
            for name, same in [("grpo", "grpo"), ("dapo", "grpo"), ("cispo", "cispo"), ("reinforce", "reinforce")]
        ),
        (policy_loss, "loss", ["name=gspo", "clip_delta=1.5"], "gspo (one loss a token"),
        *(
            (group_advantages, "advantages", [f"scaling={name}"], name)
            for name in ("group_std", "batch_std", "none", "leave_one_out")
        ),
        *((kl_divergence, "kl", [f"estimator={name}"], name) for name in ("k1", "k2", "k3")),
        *(
            (rollout_weights, "importance", [f"level={level}", f"action={action}"], f"{level} weights ({done}")
            for level in ("token", "sequence", "geometric")
            for action, done in (("truncate", "truncated"), ("mask", "masked"))
        ),
        (token_logprobs, "logprobs", [], "log softmax"),
    ],
)
def test_the_package_s_own_objective_is_what_it_is_compared_with(function, role, given, matches):
    """Whatever the two were written from: values and gradients of ours equal the probe's reference."""
    report = examine(function, role, "ours", given)
    assert report.errors == []
    assert report.matches.startswith(matches)


def shifted_and_negated(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28, delta=None):
    ratio = torch.exp(logprobs - torch.roll(old_logprobs, 1, 1))
    return -token_mean(surrogate(ratio, advantages[:, None]), mask.to(ratio.dtype))


def test_two_bugs_at_once_are_both_named():
    report = examine(shifted_and_negated, "loss", "two")
    assert report.mutations == ["sign_flipped", "old_logprobs_shifted"]
    assert report.verdict.endswith("with the loss negated and old_logprobs shifted by one.")


def cubed(logprobs, old_logprobs, advantages, mask):
    return ((logprobs - old_logprobs).exp() ** 3 * advantages[:, None] * mask).sum() / mask.sum().clamp(min=1)


def test_what_no_mistake_explains_is_said_to_be_unknown():
    report = examine(cubed, "loss", "cubed", expect="grpo")
    assert [finding.name for finding in report.errors] == ["unknown_difference"]
    assert report.matches is None


def halved(logprobs, old_logprobs, advantages, mask):
    loss = surrogate((logprobs - old_logprobs).exp(), advantages[:, None])
    return token_mean(loss, mask.to(loss.dtype)) / 4


def test_a_right_loss_times_a_constant_is_recognised_with_the_constant():
    assert examine(halved, "loss", "halved").verdict == "Matches dapo (clip 0.2 / 0.28) times 0.25."


def in_place(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - old_logprobs)
    ratio[~mask] = 0
    return token_mean(surrogate(ratio, advantages[:, None]), mask.to(ratio.dtype))


def test_an_in_place_operation_on_the_graph_is_named():
    report = examine(in_place, "loss", "in place")
    assert [finding.name for finding in report.findings] == ["in_place_on_graph"]


def where_after_exp(logprobs, old_logprobs, advantages, mask):
    a = advantages[:, None]
    loss = torch.where(mask, surrogate(torch.exp(logprobs - old_logprobs), a), 0.0)
    return loss.sum() / mask.sum().clamp(min=1)


def test_exp_before_where_is_named_though_values_and_gradients_are_right_elsewhere():
    report = examine(where_after_exp, "loss", "where")
    assert report.verdict == "Matches dapo (clip 0.2 / 0.28)."
    assert "exp_before_where" in [finding.name for finding in report.errors]


def unguarded(logprobs, old_logprobs, advantages, mask):
    loss = surrogate((logprobs - old_logprobs).exp(), advantages[:, None])
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def test_a_masked_completion_that_divides_zero_by_zero_is_an_error():
    assert {"masked_row", "all_masked"} == {finding.name for finding in examine(unguarded, "loss", "x").errors}


def in_bfloat16(logits, token_ids):
    return logits.log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def normalised_in_the_dtype_of_the_logits(logits, token_ids):
    return (logits - logits.exp().sum(-1, keepdim=True).log()).gather(-1, token_ids[..., None])[..., 0]


def test_half_precision_is_a_note_where_only_the_result_is_rounded_and_an_error_where_it_overflows():
    assert {f.level for f in examine(in_bfloat16, "logprobs", "x").findings if f.name == "half_precision"} == {"note"}
    found = examine(normalised_in_the_dtype_of_the_logits, "logprobs", "x").errors
    assert "half_precision" in {finding.name for finding in found}


def writes_into_its_mask(logprobs, old_logprobs, advantages, mask):
    result = halved(logprobs, old_logprobs, advantages, mask) * 4
    mask[:] = False
    return result


def test_writing_into_an_input_is_noted():
    names = [finding.name for finding in examine(writes_into_its_mask, "loss", "x").findings]
    assert "changes_its_input" in names


def test_expect_names_what_makes_it_another_variant():
    def dapo(logprobs, old_logprobs, advantages, mask):
        return 4 * halved(logprobs, old_logprobs, advantages, mask)

    assert examine(dapo, "loss", "x", expect="dapo").errors == []
    assert examine(dapo, "loss", "x", expect="grpo").mutations == ["token_mean_for_sequence_mean"]
    with pytest.raises(ConfigError, match="--expect is 'ppo', but the variants of this role"):
        examine(dapo, "loss", "x", expect="ppo")


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("old_per_token_logps", "old_logprobs"),
        ("old_log_prob", "old_logprobs"),
        ("log_probs_base", "ref_logprobs"),
        ("sampling_per_token_logps", "rollout_logprobs"),
        ("per_token_logps", "logprobs"),
        ("action_log_probs", "logprobs"),
        ("response_mask", "loss_mask"),
        ("cliprange_low", "clip_low"),
        ("n_samples_per_prompt", "group_size"),
        ("frobnicate", None),
    ],
)
def test_the_usual_names_are_understood(name, quantity):
    assert quantity_of(name, "loss") == quantity


def test_a_parameter_that_means_nothing_known_is_asked_for():
    def loss(logprobs, advantages, mystery):
        return logprobs.sum()

    with pytest.raises(ConfigError, match=r"The function takes mystery, but .* --arg mystery=QUANTITY"):
        bind(loss, "loss", [])
    assert bind(loss, "loss", ["mystery=loss_mask"]).quantities == {"logprobs", "advantages", "loss_mask"}
    with pytest.raises(ConfigError, match="--arg names myst, but the function has no such parameter"):
        bind(loss, "loss", ["mystery=1", "myst=1"])


def test_a_function_of_another_role_is_refused():
    with pytest.raises(ConfigError, match="--as is loss, but no parameter of the function is known to be advantages"):
        examine(kl_divergence, "loss", "kl", ["estimator=k3"])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", "it names no function"),
        ("no_such_module:f", "importing 'no_such_module' raises ModuleNotFoundError"),
        ("math:sin_", "has no 'sin_'"),
        ("math:pi", "it is a float"),
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
    ],
)
def test_a_target_that_cannot_be_loaded_says_why(target, words):
    with pytest.raises(ConfigError, match=words):
        load_function(target)


def test_the_reference_variants_differ_on_the_batches():
    """What is not told apart cannot be named: no two variants give the same loss."""
    batches = seeded_batches()
    known: list[Variant] = loss.variants(
        {"clip_low": 0.2, "clip_high": 0.28, "delta": None}, aggregated=True, weighted=False
    )
    values = [tuple(round(float(v.steps(batch)), 9) for batch in batches) for v in known]
    assert len(set(values)) == len(values) > 15


def test_batches_are_seeded_ragged_and_interleaved_where_groups_are_told():
    plain, again, mixed = seeded_batches(), seeded_batches(), seeded_batches(interleaved=True)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(plain, again, strict=True))
    assert all(len(set(batch.loss_mask.sum(-1).tolist())) > 2 for batch in plain)
    assert any((batch.group_of_completion.diff() < 0).any() for batch in mixed)
    assert all(batch.group_of_completion.bincount().min() >= 2 for batch in mixed)


def run(*words):
    return CliRunner().invoke(probe, ["code", *words])


def test_the_command_prints_a_verdict_and_says_by_its_exit_code_whether_something_is_wrong(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def right(logprobs, ref_logprobs):\n    d = ref_logprobs - logprobs\n    return d.exp() - 1 - d\n\n"
        "def wrong(logprobs, ref_logprobs):\n    return -right(logprobs, ref_logprobs)\n"
    )
    right, wrong = run(f"{file}:right", "--as", "kl"), run(f"{file}:wrong", "--as", "kl")
    assert (right.exit_code, wrong.exit_code) == (0, 1)
    assert "✓ Matches k3." in right.stdout
    assert "✗ Matches k3 with the KL negated." in wrong.stdout
    report = json.loads(run(f"{file}:wrong", "--as", "kl", "--json").stdout)
    assert (report["mutations"], report["exit_code"]) == (["kl_negated"], 1)
    assert isinstance(run(f"{file}:right", "--as", "kl", "--samples", "x").exception, ConfigError)
    assert isinstance(run(f"{file}:right", "--as", "reward", "--expect", "x").exception, ConfigError)
