"""Beyond values and gradients on ordinary batches: layouts, precision, edges, leaks and side effects."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.binding import Binding
from leadline.probes.code.edges import EDGES
from leadline.probes.code.explain import TRAINED, Attempt, Explained
from leadline.probes.code.findings import Finding
from leadline.probes.code.outcome import Outcome, difference, measure, value

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NATS = 0.01
"""An error of a logprob above this is a precision problem (the ratio is 1 % off)."""

CONSTANTS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "rollout_weights")
"""No gradient belongs to these."""


def edge_findings(explained: Explained, role: str) -> Iterator[Finding]:
    """What goes wrong at the edges and does not follow from the mistake that was named; each fault once."""
    said: set[str] = set()
    one = explained.attempt
    mutated = any(match.mutations for match in explained.matches)
    for edge in EDGES[role]:
        batch = edge.change(one.batches[0])
        finding = edge.finding(measure(one.function, batch, TRAINED.get(role)), batch)
        if finding is None or finding.name in said:
            continue
        if mutated and explained.steps and edge.finding(measure(explained.steps, batch, TRAINED.get(role)), batch):
            continue  # the mistake that was named does this
        said.add(finding.name)
        yield finding


def layout_findings(explained: Explained, attempts: Sequence[Attempt], role: str) -> Iterator[Finding]:
    """A loss that is right with advantages by token, and runs with advantages by completion where it should not."""
    chosen = explained.attempt.layout
    tried_first = attempts[0].layout
    if role != "loss" or chosen.advantages != "token" or tried_first.advantages != "completion":
        return
    if attempts[0].outcomes[0].error is None:
        yield Finding(
            "note",
            "advantage_broadcast",
            "Right with advantages [completion, token] only: with [completion] they are broadcast along tokens",
            "Where a batch has as many completions as tokens, each token gets the advantage of another completion.",
            "If the caller has one advantage a completion, write advantages[:, None].",
        )


def leaking_gradients(explained: Explained, binding: Binding) -> Iterator[Finding]:
    """A gradient that reaches what is meant to be constant."""
    one = explained.attempt
    for name in CONSTANTS:
        if name not in binding.quantities:
            continue
        gradient = measure(one.function, one.batches[0], name).gradient
        if gradient is not None and bool(gradient.abs().gt(0).any()):
            yield Finding(
                "note",
                f"{name.split('_')[0]}_not_detached",
                f"A gradient reaches {name}",
                "If the caller computes them without torch.no_grad(), memory doubles and another model is trained.",
                f"Use {name}.detach().",
            )


def changed_inputs(explained: Explained, binding: Binding) -> Iterator[Finding]:
    """Tensors of the batch that the function has written to."""
    one = explained.attempt
    batch = one.batches[0].copy()
    value(lambda own: binding.call(own, one.layout), batch)
    names = [
        field.name
        for field in fields(batch)
        if isinstance(before := getattr(one.batches[0], field.name), Tensor)
        and not torch.equal(before, getattr(batch, field.name))
    ]
    if names:
        yield Finding(
            "note",
            "changes_its_input",
            f"It writes into {', '.join(names)}",
            "Whoever uses the tensor afterwards gets other numbers; on the graph, backward may raise.",
            "Use torch.where or masked_fill, not assignment.",
        )


def precision_findings(explained: Explained, role: str) -> Iterator[Finding]:
    """Half precision that costs more than its own rounding, or overflows."""
    for name, (error, outcome, rounding) in _precision(explained, role).items():
        if outcome.error is not None or name == "fp32":
            continue
        if not outcome.finite:
            yield _half(name, "the result is not finite", "error")
        elif role == "logprobs" and error > NATS:
            only_rounding = error <= rounding
            evidence = f"off by up to {error:.2g} nats" + (", which is the rounding of the result" * only_rounding)
            yield _half(name, evidence, "note" if only_rounding else "error")


def precision_facts(explained: Explained, role: str) -> dict[str, str]:
    """The largest error for inputs of each dtype, against float64 on the same rounded inputs."""
    words = []
    for name, (error, outcome, _) in _precision(explained, role).items():
        shown = "raises" if outcome.error else f"{error:.1g}" + (" nats" if role == "logprobs" else "")
        words.append(f"{name} {shown}")
    return {"largest error": ", ".join(words)} if words else {}


def _precision(explained: Explained, role: str) -> dict[str, tuple[float, Outcome, float]]:
    """(error, outcome, rounding of the result) by dtype. The error is absolute for logprobs, else relative."""
    if explained.steps is None:
        return {}
    found = {}
    for name, dtype in DTYPES.items():
        batch = _sharp(explained.attempt.batches[1]).to(dtype)
        outcome = value(explained.attempt.function, batch)
        truth = value(explained.steps, batch.to(torch.float64)).values
        error, rounding = difference(outcome.values, truth), 0.0
        if role == "logprobs" and outcome.values is not None and truth is not None:
            error = float((outcome.values - truth).abs().max())
            rounding = torch.finfo(dtype).eps * float(truth.abs().max())
        found[name] = (error, outcome, rounding)
    return found


def _sharp(batch: ProbeBatch) -> ProbeBatch:
    """Logits as a trained model has them: up to 50."""
    return batch.having(logits=12 * batch.logits)


def _half(name: str, evidence: str, level: str) -> Finding:
    return Finding(
        "error" if level == "error" else "note",
        "half_precision",
        f"Inputs in {name} are not computed in float32",
        "Ratios are noise of a per cent and more, worst for sharp distributions; float16 overflows.",
        "Cast to float32 first: x.float().",
        evidence,
    )
