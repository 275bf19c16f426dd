"""Every policy loss with every term, against loops in float64 that share no code with the learner; gradients too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollwire.learner import losses
from rollwire.learner.losses import MicroBatchTargets, micro_batch_loss, sample_weights
from rollwire.learner.objective import Aggregation, KlEstimator, LossSettings
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.learner.ratios import token_spans
from rollwire.learner.samples import Sample
from rollwire.serving.config.algorithm import CLIPPING, DUAL_CLIPPING

CPU = torch.device("cpu")
# Two samples; the first has three segments, the second two.
MASKS = [[0, 1, 1, 1, 0, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1]]


@dataclass
class Token:
    """One trained token of the plain implementation."""

    sample: int
    segment: int
    logprob: Tensor
    old: float
    advantage: float
    entropy: float
    reference: float
    importance: float


def tokens(logprobs: Tensor, seed: int = 0, *, constant: bool = False) -> list[Token]:
    """Returns the tokens of `MASKS` with random values; `constant` gives every token of a sample one advantage."""
    random = np.random.default_rng(seed)
    found: list[Token] = []
    segment = -1
    for sample, mask in enumerate(MASKS):
        shared = 1.3 if sample == 0 else -0.7
        for position, trained in enumerate(mask):
            if not trained:
                continue
            segment += not mask[position - 1]
            logprob = logprobs[len(found)]
            found.append(
                Token(
                    sample,
                    segment,
                    logprob,
                    logprob.item() + random.normal(0, 0.4),
                    shared if constant else random.normal(),
                    random.uniform(0, 3),
                    logprob.item() + random.normal(0, 0.4),
                    random.uniform(0, 2),
                )
            )
    return found


def spans_of(all_tokens: list[Token], token: Token, level: str) -> Iterator[Token]:
    for other in all_tokens:
        if level == "token":
            if other is token:
                yield other
        elif (other.segment == token.segment) if level == "segment" else (other.sample == token.sample):
            yield other


def ratio_of(all_tokens: list[Token], token: Token, level: str, *, mean: bool) -> Tensor:
    """Returns the ratio over a token's span: its value is the span's, its gradient that of the token itself."""
    members = list(spans_of(all_tokens, token, level))
    log = sum(member.logprob.item() - member.old for member in members) / (len(members) if mean else 1)
    return math.exp(log) * torch.exp(token.logprob - token.logprob.item())


def surrogate(level: str) -> Callable[[list[Token], Token, LossSettings], Tensor]:
    def loss(all_tokens: list[Token], token: Token, settings: LossSettings) -> Tensor:
        ratio, a = ratio_of(all_tokens, token, level, mean=True), token.advantage
        value = ratio.item()
        clipped = min(max(value, 1 - settings.clip_low), 1 + settings.clip_high)
        result = -ratio * a if value * a <= clipped * a else ratio * 0 - clipped * a
        if a < 0 and settings.dual_clip and result.item() > -settings.dual_clip * a:
            result = ratio * 0 - settings.dual_clip * a
        return result

    return loss


def plain_cispo(all_tokens: list[Token], token: Token, settings: LossSettings) -> Tensor:
    ratio = math.exp(token.logprob.item() - token.old)
    return -min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high) * token.advantage * token.logprob


def plain_topr(level: str) -> Callable[[list[Token], Token, LossSettings], Tensor]:
    def loss(all_tokens: list[Token], token: Token, settings: LossSettings) -> Tensor:
        ratio = ratio_of(all_tokens, token, level, mean=False).item()
        weight = 1.0 if token.advantage >= 0 else min(ratio, 1.0)
        return -weight * token.advantage * token.logprob

    return loss


PLAIN: dict[str, Callable[[list[Token], Token, LossSettings], Tensor]] = {
    "ppo_clip": surrogate("token"),
    "gspo": surrogate("sample"),
    "gspo_segment": surrogate("segment"),
    "cispo": plain_cispo,
    "topr": plain_topr("sample"),
    "topr_token": plain_topr("token"),
    "policy_gradient": lambda all_tokens, token, settings: -token.advantage * token.logprob,
}


def plain_kl(settings: LossSettings, token: Token) -> Tensor:
    d = token.logprob - token.reference
    if settings.kl_estimator is KlEstimator.K1:
        return d
    return d * d / 2 if settings.kl_estimator is KlEstimator.K2 else torch.exp(-d) + d - 1


def plain_loss(all_tokens: list[Token], settings: LossSettings) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    counts = [sum(mask) for mask in MASKS]
    for token in all_tokens:
        value = PLAIN[settings.policy_loss](all_tokens, token, settings) * token.importance
        value = value - settings.entropy_coefficient * token.entropy
        value = value + settings.kl_coefficient * plain_kl(settings, token)
        total = (
            total
            + {
                Aggregation.TOKEN_MEAN: value / sum(counts),
                Aggregation.SEQUENCE_MEAN_TOKEN_MEAN: value / counts[token.sample] / len(counts),
                Aggregation.SEQUENCE_MEAN_TOKEN_SUM: value / len(counts),
                Aggregation.FIXED_LENGTH: value / len(counts) / max(settings.fixed_length_tokens, 1),
            }[settings.aggregation]
        )
    return total


def found_loss(all_tokens: list[Token], logprobs: Tensor, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and metrics of the learner's own code in float64."""
    samples = [
        Sample(
            "s", np.zeros(len(mask), np.int64), np.array(mask, bool), np.zeros(0, np.float32), np.zeros(0, np.float32)
        )
        for mask in MASKS
    ]
    weights = sample_weights(settings, [sample.targets for sample in samples])

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(token, name) for token in all_tokens], dtype=torch.float64)

    targets = MicroBatchTargets(
        column("advantage"),
        column("old"),
        torch.from_numpy(np.repeat(weights, [sample.targets for sample in samples])),
        token_spans(samples, CPU),
        column("importance"),
        column("reference"),
    )
    return micro_batch_loss(logprobs, column("entropy"), targets, settings, len(all_tokens))


def start(seed: int) -> Tensor:
    count = sum(map(sum, MASKS))
    drawn = -np.abs(np.random.default_rng(seed).normal(2, 1, count))
    return torch.tensor(drawn, dtype=torch.float64, requires_grad=True)


def settings_of(name: str, **changes: object) -> LossSettings:
    return replace(LossSettings(policy_loss=name, clip_low=0.2, clip_high=0.28), **changes)  # type: ignore[arg-type]


def test_every_loss_has_a_plain_implementation() -> None:
    assert set(PLAIN) == set(POLICY_LOSSES), "add the loss in plain Python to PLAIN of this file"


def test_settings_are_refused_where_the_loss_does_not_read_them() -> None:
    assert set(CLIPPING) == {name for name, loss in POLICY_LOSSES.items() if loss.clips}
    assert set(DUAL_CLIPPING) == {name for name, loss in POLICY_LOSSES.items() if loss.dual_clips}


def test_the_loss_of_the_page_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "PolicyLoss" in code)
    names: dict[str, Any] = {}
    exec(source, names)

    def plain(all_tokens: list[Token], token: Token, settings: LossSettings) -> Tensor:
        ratio = ratio_of(all_tokens, token, "token", mean=True)
        room = settings.clip_high if token.advantage > 0 else settings.clip_low
        return -token.advantage * (1 + room * torch.tanh((ratio - 1) / room))

    monkeypatch.setattr(losses, "POLICY_LOSSES", {**POLICY_LOSSES, **names["NEW"]})
    monkeypatch.setitem(PLAIN, "soft_clip", plain)
    logprobs = start(5)
    all_tokens = tokens(logprobs, 5)
    settings = settings_of("soft_clip")
    found, _ = found_loss(all_tokens, logprobs, settings)
    expected = plain_loss(all_tokens, settings)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (found_gradient,), (gradient,) = torch.autograd.grad(found, logprobs), torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, "kl_coefficient": 0.3, "kl_estimator": KlEstimator.K1},
        {"aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_SUM, "kl_coefficient": 0.3, "kl_estimator": KlEstimator.K2},
        {"aggregation": Aggregation.FIXED_LENGTH, "fixed_length_tokens": 50, "kl_coefficient": 0.3},
        {"dual_clip": 1.5, "entropy_coefficient": 0.1},
    ],
    ids=["plain", "k1", "k2", "k3", "dual"],
)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_against_loops(name: str, changes: dict[str, object], seed: int) -> None:
    if "dual_clip" in changes and not POLICY_LOSSES[name].dual_clips:
        changes = {**changes, "dual_clip": 0.0}
    settings = settings_of(name, **changes)
    logprobs = start(seed)
    all_tokens = tokens(logprobs, seed)

    found, metrics = found_loss(all_tokens, logprobs, settings)
    wanted = plain_loss(all_tokens, settings)

    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert metrics["actor/total_loss"].item() == pytest.approx(wanted.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, logprobs)
    (expected,) = torch.autograd.grad(wanted, logprobs)
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_has_the_gradient_of_the_sequence_ratio_where_a_sample_has_one_advantage(seed: int) -> None:
    """Against equation 5 of the paper, differentiated through the geometric mean itself."""
    settings = settings_of("gspo", aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN)
    logprobs = start(seed)
    all_tokens = [replace(token, importance=1.0) for token in tokens(logprobs, seed, constant=True)]
    found, _ = found_loss(all_tokens, logprobs, settings)

    wanted = torch.zeros((), dtype=torch.float64)
    for sample in range(len(MASKS)):
        own = [token for token in all_tokens if token.sample == sample]
        ratio = torch.exp(sum(token.logprob - token.old for token in own) / len(own))
        a = own[0].advantage
        wanted = wanted - torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) / len(MASKS)

    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, logprobs)
    (expected,) = torch.autograd.grad(wanted, logprobs)
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("name", ["gspo", "gspo_segment"])
def test_with_one_token_the_sequence_ratio_is_the_token_ratio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MASKS", [[0, 1, 0], [0, 0, 1]])
    logprobs = start(0)
    all_tokens = tokens(logprobs)

    found, _ = found_loss(all_tokens, logprobs, settings_of(name))
    wanted, _ = found_loss(all_tokens, logprobs, settings_of("ppo_clip"))

    assert found.item() == wanted.item()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(name: str) -> None:
    logprobs = start(1)
    all_tokens = [replace(token, old=token.logprob.item()) for token in tokens(logprobs)]

    found, _ = found_loss(all_tokens, logprobs, settings_of(name))
    wanted, _ = found_loss(all_tokens, logprobs, settings_of("policy_gradient"))

    (gradient,) = torch.autograd.grad(found, logprobs)
    (expected,) = torch.autograd.grad(wanted, logprobs)
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
