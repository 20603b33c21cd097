"""Fine-tuning is the policy's own update: its loss is the mean of -log pi, and it is resumed to the last digit."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.config import parse_config
from leadline.doctor import diagnose
from leadline.doctor.readers import read_runs
from leadline.errors import ConfigError, RunDirError, TrainingError
from leadline.metrics import find
from leadline.models import load_model
from leadline.policy.policy import Policy
from leadline.run_dir import read_evaluations, read_metrics
from leadline.settings.model import Model
from leadline.sft.data import demonstration_batch
from leadline.sft.session import SftSession, held_out_metrics
from tests.builders import MODELS, all_finite, optimizer_inputs, plain_logprobs, poison_logits, same, snapshot
from tests.sft.runs import opened, printed, sft_config, tuned


def demonstrations(session: SftSession, count: int = 4) -> Any:
    prompts = [session.data.train.prompt(i) for i in range(count)]
    return demonstration_batch(prompts, session.writer, session.trainer_config)


def plain_loss(policy: Policy, batch: Any) -> float:
    logprobs = torch.cat([plain_logprobs(policy.model, batch, c) for c in range(batch.num_completions)])
    return -float(logprobs.double().mean())


# The loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_of_minus_log_pi_over_all_completion_tokens_of_the_step(tmp_path: Path) -> None:
    session = opened(sft_config(), tmp_path / "run")
    batch = demonstrations(session)
    expected = plain_loss(session.policy, batch)
    assert len(set(batch.lengths.tolist())) > 1
    assert session.policy.update(batch).metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_model_that_will_be_sampled_with_a_repetition_penalty_is_taught_under_it(tmp_path: Path) -> None:
    session = opened(sft_config(sampling={"max_tokens": 64, "repetition_penalty": 1.3}), tmp_path / "run")
    policy, batch = session.policy, demonstrations(session)
    losses = []
    for c in range(batch.num_completions):
        prompt = batch.prompt_ids[int(batch.group_of_completion[c])].tolist()
        ids = [*prompt, *batch.token_ids[batch.tokens_of([c])].tolist()]
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0].detach()
        for place in range(len(prompt), len(ids)):
            seen = torch.zeros(logits.shape[1], dtype=torch.bool)
            seen[ids[:place]] = True
            row = logits[place - 1]
            penalised = torch.where(seen, torch.where(row > 0, row / 1.3, row * 1.3), row)
            losses.append(-float(penalised.log_softmax(-1)[ids[place]]))
    plain = plain_loss(policy, batch)
    loss = policy.update(batch).metrics["loss"]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert loss != pytest.approx(plain, rel=1e-4)


def test_its_gradient_is_that_of_each_sequence_alone(tmp_path: Path) -> None:
    session = opened(sft_config(), tmp_path / "run")
    policy, batch = session.policy, demonstrations(session)
    seen = optimizer_inputs(policy)
    other = load_model(session.config.model, session.config.run.seed).model
    total = torch.zeros(())
    for c in range(batch.num_completions):
        prompt = batch.prompt_ids[int(batch.group_of_completion[c])]
        ids = batch.token_ids[batch.tokens_of([c])]
        logits = other(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        total = total - logits.log_softmax(-1).gather(-1, ids[:, None]).sum()
    (total / len(batch.token_ids)).backward()
    policy.update(batch)
    expected = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    assert seen[0].keys() == expected.keys()
    for name, grad in seen[0].items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_micro_batches_and_shared_prompts_change_no_loss(tmp_path: Path) -> None:
    losses = []
    for tokens in (16, 100, 4096):
        session = opened(sft_config(optimizer={"tokens_per_micro": tokens}), tmp_path / str(tokens))
        prompts = [session.data.train.prompt(i) for i in range(3)]
        twice = [*prompts, replace(prompts[0], columns={"demonstration": "another answer"[:7]})]
        batch = demonstration_batch(twice, session.writer, session.trainer_config)
        assert (batch.num_groups, batch.num_completions) == (3, 4)
        losses.append(session.policy.update(batch).metrics["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_held_out_loss_and_perplexity_are_over_all_tokens(tmp_path: Path) -> None:
    session = opened(sft_config(), tmp_path / "run")
    batch = demonstrations(session)
    metrics = held_out_metrics(session.policy, batch, session.trainer_config)
    expected = plain_loss(session.policy, batch)
    assert metrics["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval/perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)
    assert metrics["eval/tokens"] == len(batch.token_ids)


@pytest.mark.parametrize("model", [*MODELS.values(), {"gradient_checkpointing": True}], ids=[*MODELS, "recomputing"])
def test_it_learns_with_every_kind_of_weights(model: dict[str, Any], tmp_path: Path) -> None:
    session = tuned(tmp_path / "run", model=model, optimizer={"learning_rate": 1e-2}, run={"steps": 8})
    before, after = (session.evaluations[step]["eval/loss"] for step in (0, 8))
    assert after < 0.8 * before


# The run --------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_settings_its_metrics_its_evaluations_and_a_model(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = tuned(path, sft={"greedy_prompts": 2}, eval={"every": 2})
    rows = read_metrics(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["data/epoch"] for row in rows] == pytest.approx([4 / 24, 8 / 24, 12 / 24, 16 / 24])
    assert all(find(name) for row in rows for name in row)
    assert not any(name.split("/")[0] in ("ledger", "importance", "advantage", "reward") for name in rows[0])
    evaluations = read_evaluations(path / "evaluations.jsonl")
    assert [(step, len(rewards)) for step, rewards, _, _ in evaluations] == [(0, 2), (2, 2), (4, 2)]
    assert all(find(name) for name in evaluations[0][3])
    assert json.loads((path / "config.json").read_text())["sft"]["demonstrations_per_step"] == 4
    assert (path / "checkpoints/step_000004/model/model.safetensors").is_file()
    assert session.finished


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_digit(model: dict[str, Any], tmp_path: Path) -> None:
    sections: dict[str, Any] = {"model": model, "eval": {"every": 3}, "optimizer": {"schedule": "cosine"}}
    whole = tuned(tmp_path / "whole", **sections)
    stopped = opened(sft_config(**sections), tmp_path / "parts")
    stopped.stopping = lambda: stopped.policy.version >= 3  # the checkpoint of step 2 is behind
    asyncio.run(stopped.run())
    assert not stopped.finished
    (tmp_path / "parts/checkpoints/step_000003").rename(tmp_path / "gone")  # as if it had been killed there
    resumed = opened(sft_config(**sections), tmp_path / "parts", resume=True)
    assert resumed.policy.version == 2
    asyncio.run(resumed.run())
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
    assert same(snapshot(resumed.policy.model), snapshot(whole.policy.model))
    assert resumed.finished


def measured(path: Path) -> dict[str, Any]:
    """What the clock and the machine have no part in."""
    rows = [
        {n: repr(v) for n, v in row.items() if n.split("/")[0] not in ("time", "throughput", "memory")}
        for row in read_metrics(path / "metrics.jsonl")
    ]
    return {"rows": rows, "evaluations": (path / "evaluations.jsonl").read_text()}


def test_each_epoch_holds_every_demonstration_once_in_another_order(tmp_path: Path) -> None:
    stream = opened(sft_config(), tmp_path / "run").data.train
    first, second = ([stream.prompt(e * 24 + i).text for i in range(24)] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_the_steps_of_an_epoch_train_on_every_demonstration_once(tmp_path: Path) -> None:
    tuned(tmp_path / "run", run={"steps": 6, "blackbox_steps": 6})
    sidecars = [json.loads(path.read_text()) for path in (tmp_path / "run/blackbox").glob("*.json")]
    prompts = [prompt for sidecar in sidecars for prompt in sidecar["info"]["prompts"]]
    assert len(prompts) == len(set(prompts)) == 24


def test_held_out_demonstrations_are_never_trained(tmp_path: Path) -> None:
    data = opened(sft_config(), tmp_path / "run").data
    assert not {p.text for p in data.held_out} & {data.train.prompt(i).text for i in range(len(data.train))}


@pytest.mark.parametrize(
    ("sections", "name"),
    [({"sft": {"demonstrations_per_step": 2}}, "sft.demonstrations_per_step"), ({"run": {"seed": 1}}, "run.seed")],
)
def test_a_run_is_not_resumed_with_other_data(sections: dict[str, Any], name: str, tmp_path: Path) -> None:
    tuned(tmp_path / "run", run={"steps": 1})
    with pytest.raises(ConfigError, match=f"{name} is .*, but the run in this directory was started with"):
        opened(sft_config(**sections), tmp_path / "run", resume=True)


def test_a_directory_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    tuned(tmp_path / "run", run={"steps": 1})
    with pytest.raises(RunDirError, match="already holds a run"):
        opened(sft_config(), tmp_path / "run")


# The guard ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_steps_that_are_not_finite_leave_the_weights_alone_and_too_many_stop_the_run(
    value: float, tmp_path: Path
) -> None:
    session = opened(sft_config(eval={"prompts": 0}, optimizer={"max_discarded_steps": 2}), tmp_path / "run")
    poison_logits(session.policy, value)
    before = snapshot(session.policy.model)
    with pytest.raises(TrainingError, match="max_discarded_steps is 2"):
        asyncio.run(session.run())
    assert same(snapshot(session.policy.model), before) and all_finite(session.policy)
    assert printed(session).count("is discarded") == 2
    assert len(list((tmp_path / "run/blackbox").glob("*.safetensors"))) == 2
    assert (tmp_path / "run/checkpoints/step_000002/model").is_dir()


# What comes after -----------------------------------------------------------------------------------------------------


def test_the_saved_model_is_the_policy_of_a_reinforcement_learning_run_with_its_new_tokens(tmp_path: Path) -> None:
    tokens = ["<answer>", "</answer>"]
    session = tuned(tmp_path / "run", model={"add_special_tokens": tokens})
    directory = tmp_path / "run/checkpoints/step_000004/model"
    loaded = load_model(Model(name=str(directory), device="cpu", add_special_tokens=tuple(tokens)))
    assert loaded.new_tokens == ()
    assert same(snapshot(loaded.model), snapshot(session.policy.model))
    assert loaded.tokenizer("</answer>", add_special_tokens=False)["input_ids"] == [261]
    config = parse_config(
        {
            "model": {"name": str(directory), "device": "cpu"},
            "data": {"source": "x.jsonl"},
            "rewards": [{"name": "exact_match"}],
        }
    )
    assert Policy(load_model(config.model), config).packs


def counting(completion: str) -> float:
    return float(len(completion))


def test_greedy_completions_are_scored_with_the_rewards_of_the_recipe(tmp_path: Path) -> None:
    rewards = [{"name": "tests.sft.test_session:counting", "label": "count"}]
    session = tuned(tmp_path / "run", rewards=rewards, sft={"greedy_prompts": 2}, run={"steps": 1})
    metrics = session.evaluations[0]
    assert metrics["eval/reward/count/mean"] == metrics["eval/reward_mean"] > 1


def test_a_policy_that_has_learned_one_answer_writes_it_and_stops(tmp_path: Path) -> None:
    """Greedy completions end where the demonstrations do: the terminator is learned too."""
    rows = [{"prompt": f"{letter}?", "answer": "yes"} for letter in "abcdef"]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session = tuned(
        tmp_path / "run",
        data={"source": str(source), "eval_source": str(source)},
        sft={"demonstrations_per_step": 2, "greedy_prompts": 2},
        eval={"prompts": 2},
        optimizer={"learning_rate": 1e-2},
        run={"steps": 20},
    )
    rewards = [session.evaluations[step]["eval/reward_mean"] for step in (0, 20)]
    assert rewards == [0.0, 1.0]


def test_asked_to_stop_it_stops_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    session = opened(sft_config(run={"checkpoint_every": 0}), tmp_path / "run")
    session.stopping = lambda: session.policy.version >= 1
    asyncio.run(session.run())
    assert (session.policy.version, session.finished) == (1, False)
    assert (tmp_path / "run/checkpoints/step_000001/model").is_dir()


def test_the_doctor_takes_a_fine_tuning_run_for_what_it_is(tmp_path: Path) -> None:
    """Its black boxes hold no rollouts: nothing is missing from them."""
    tuned(tmp_path / "run")
    assert list((tmp_path / "run/blackbox").glob("*.safetensors"))
    [run] = read_runs([tmp_path / "run"])
    assert [finding.rule for finding in diagnose(run).findings] == []
