"""The training step against a plain implementation that shares no code with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollwire.learner.batching import Budget, optimizer_step_split
from rollwire.learner.model import Policy
from rollwire.learner.objective import Aggregation, ImportanceMask, ImportanceWeight, LossSettings
from rollwire.learner.optimizer import PolicyOptimizer, StepOutcome
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.learner.ratios import RatioLevel
from rollwire.learner.samples import Sample
from rollwire.learner.scoring import score
from rollwire.learner.step import StepSettings, train_step
from rollwire.serving.config.sections import OptimizerSection

CPU = torch.device("cpu")
LARGE, SMALL = Budget(100_000, 128), Budget(1, 0)
MakeModel = Callable[..., Any]
MakeSamples = Callable[..., list[Sample]]


class GradientReader:
    """Takes the place of the optimizer: keeps the gradient of every optimizer step and changes nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self) -> StepOutcome:
        found = {name: parameter.grad.clone() for name, parameter in self._model.named_parameters()}
        self.gradients.append(found)
        self._model.zero_grad()
        return StepOutcome(applied=True, grad_norm=1.0, learning_rate=0.0)


def plain_loss(model: Any, samples: list[Sample], loss: LossSettings, old: list[np.ndarray]) -> torch.Tensor:
    """Computes the loss of one optimizer step token by token from full logits."""
    per_sample = []
    for sample, old_logprobs in zip(samples, old, strict=True):
        logits = model(input_ids=torch.from_numpy(sample.token_ids)[None]).logits[0]
        terms = []
        for position in range(1, len(sample.token_ids)):
            if not sample.loss_mask[position]:
                continue
            logp = torch.log_softmax(logits[position - 1] / loss.temperature, dim=0)
            ratio = torch.exp(logp[int(sample.token_ids[position])] - float(old_logprobs[position]))
            advantage = float(sample.advantages[position])
            clipped = min(max(ratio.item(), 1 - loss.clip_low), 1 + loss.clip_high)
            surrogate = ratio * advantage if ratio.item() * advantage <= clipped * advantage else clipped * advantage
            entropy = -(logp.exp() * logp).sum()
            terms.append(-surrogate - loss.entropy_coefficient * entropy)
        per_sample.append(terms)
    if loss.aggregation is Aggregation.TOKEN_MEAN:
        return sum(sum(terms) for terms in per_sample) / sum(len(terms) for terms in per_sample)
    if loss.aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        return sum(sum(terms) / len(terms) for terms in per_sample) / len(per_sample)
    if loss.aggregation is Aggregation.FIXED_LENGTH:
        return sum(sum(terms) for terms in per_sample) / (len(per_sample) * loss.fixed_length_tokens)
    return sum(sum(terms) for terms in per_sample) / len(per_sample)


def near_policy(model: Any, samples: list[Sample], temperature: float) -> list[Sample]:
    """Returns samples with behaviour log-probabilities near the model's: some ratios are clipped, some are not."""
    random = np.random.default_rng(5)
    scores = score(Policy(model, CPU, "float32"), samples, temperature, LARGE)
    return [
        replace(sample, logprobs=logprobs + random.normal(0, 0.3, len(logprobs)).astype(np.float32))
        for sample, (logprobs, _) in zip(samples, scores, strict=True)
    ]


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("budget", [LARGE, SMALL], ids=["one micro-batch", "many micro-batches"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_and_gradient_are_those_of_the_plain_implementation(
    aggregation: Aggregation, budget: Budget, tied: bool, make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model = make_model(tie_word_embeddings=tied)
    loss = LossSettings(
        clip_low=0.2, clip_high=0.28, entropy_coefficient=0.01, aggregation=aggregation, temperature=0.9
    )
    if aggregation is Aggregation.FIXED_LENGTH:
        loss = replace(loss, fixed_length_tokens=16)
    samples = near_policy(model, make_samples(), 0.9)
    reader = GradientReader(model)

    metrics = train_step(Policy(model, CPU, "float32"), reader, samples, StepSettings(loss, 1, 0), budget)

    expected = plain_loss(model, samples, loss, [sample.logprobs for sample in samples])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    assert 0.1 < metrics["actor/ppo_ratio_clipfrac"] < 0.9  # both branches of the clip are exercised
    # token sums are an order of magnitude larger than means, and so is their rounding
    scale = 10 if aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_SUM else 1
    assert metrics["actor/total_loss"] == pytest.approx(expected.item(), abs=1e-6 * scale)
    for (name, _), wanted in zip(model.named_parameters(), gradients, strict=True):
        assert (reader.gradients[0][name] - wanted).abs().max() <= 1e-6 * scale, name


def test_each_optimizer_step_sees_its_own_samples_and_denominator(
    make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model, loss = make_model(), LossSettings()
    samples = near_policy(model, make_samples(), 1.0)
    reader = GradientReader(model)

    train_step(Policy(model, CPU, "float32"), reader, samples, StepSettings(loss, 3, shuffle_seed=9), LARGE)

    split = optimizer_step_split(len(samples), 3, seed=9)
    assert len(reader.gradients) == len(split) == 3
    for found, chosen in zip(reader.gradients, split, strict=True):
        part = [samples[index] for index in chosen]
        expected = plain_loss(model, part, loss, [sample.logprobs for sample in part])
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        for (name, _), wanted in zip(model.named_parameters(), gradients, strict=True):
            assert (found[name] - wanted).abs().max() <= 1e-6, name


def trained(model: Any, samples: list[Sample], budget: Budget, precision: str = "float32", **loss: Any) -> Any:
    policy = Policy(model, CPU, precision)
    optimizer = PolicyOptimizer(model, OptimizerSection(learning_rate=1e-3), 10, fused=True)
    metrics = train_step(policy, optimizer, samples, StepSettings(LossSettings(**loss), 2, 1), budget)
    return metrics, optimizer


def test_micro_batches_do_not_change_the_trained_weights(make_model: MakeModel, make_samples: MakeSamples) -> None:
    samples = near_policy(make_model(), make_samples(12), 1.0)
    whole, divided = make_model(), make_model()

    whole_metrics, _ = trained(whole, samples, LARGE)
    divided_metrics, _ = trained(divided, samples, SMALL)

    start = make_model()
    for (name, left), right, before in zip(
        whole.named_parameters(), divided.parameters(), start.parameters(), strict=True
    ):
        # Adam divides by the gradient's own size: where it is all rounding, so is the step.
        assert (left - right).abs().quantile(0.99) <= 1e-6, name
        assert not torch.equal(left, before)
    assert whole_metrics == pytest.approx(divided_metrics, abs=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_micro_batches_do_not_change_the_gradient_of_any_loss(
    name: str, make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model, random = make_model(), np.random.default_rng(3)
    samples = [
        replace(sample, reference_logprobs=sample.logprobs + random.normal(0, 0.2, len(sample.logprobs)).astype("f"))
        for sample in near_policy(model, make_samples(8), 1.0)
    ]
    loss = LossSettings(
        policy_loss=name,
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        recompute_old_logprobs=True,
        kl_coefficient=0.1,
        importance_weight=ImportanceWeight(RatioLevel.SEGMENT_MEAN, 1.2),
        importance_masks=(ImportanceMask(RatioLevel.TOKEN, 0.7, 1.5),),
    )

    def gradient(budget: Budget) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        reader = GradientReader(model)
        metrics = train_step(Policy(model, CPU, "float32"), reader, samples, StepSettings(loss, 1, 0), budget)
        return metrics, reader.gradients[0]

    whole_metrics, whole = gradient(LARGE)
    divided_metrics, divided = gradient(SMALL)

    for parameter, wanted in whole.items():
        assert (divided[parameter] - wanted).abs().max() <= 1e-6, parameter
    assert divided_metrics == pytest.approx(whole_metrics, abs=1e-5)
    assert 0.3 < whole_metrics["actor/train_infer_final_mask_mean"] < 1
    assert whole_metrics["actor/kl_loss"] > 0


def test_equal_learners_stay_equal_bit_for_bit(make_model: MakeModel, make_samples: MakeSamples) -> None:
    samples = make_samples(9)
    left, right = make_model(), make_model()

    trained(left, samples, Budget(100, 16))
    trained(right, samples, Budget(100, 16))

    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def test_training_makes_good_tokens_likelier(make_model: MakeModel, make_samples: MakeSamples) -> None:
    model = make_model()
    samples = near_policy(model, make_samples(8), 1.0)
    policy = Policy(model, CPU, "float32")
    before = score(policy, samples, 1.0, LARGE)

    trained(model, samples, LARGE)

    after = score(policy, samples, 1.0, LARGE)
    moved = sum(
        float(((now - then) * sample.advantages)[sample.loss_mask].sum())
        for sample, (now, _), (then, _) in zip(samples, after, before, strict=True)
    )
    assert moved > 0


def test_recomputed_old_logprobs_replace_those_of_the_engine(make_model: MakeModel, make_samples: MakeSamples) -> None:
    model, samples = make_model(), make_samples()
    reader = GradientReader(model)
    settings = StepSettings(LossSettings(recompute_old_logprobs=True), 1, 0)

    metrics = train_step(Policy(model, CPU, "float32"), reader, samples, settings, LARGE)

    own = [logprobs for logprobs, _ in score(Policy(model, CPU, "float32"), samples, 1.0, LARGE)]
    expected = plain_loss(model, samples, settings.loss, own)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for (name, _), wanted in zip(model.named_parameters(), gradients, strict=True):
        assert (reader.gradients[0][name] - wanted).abs().max() <= 2e-6, name
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/ratio_min"] == pytest.approx(1.0, abs=1e-5)


def shifted(model: Any, samples: list[Sample], shifts: list[float], comparable: list[bool]) -> list[Sample]:
    """Returns samples whose recorded log-probabilities are the model's own minus a shift."""
    scores = score(Policy(model, CPU, "float32"), samples, 1.0, LARGE)
    return [
        replace(sample, logprobs=logprobs - np.float32(shift), comparable=flag)
        for sample, (logprobs, _), shift, flag in zip(samples, scores, shifts, comparable, strict=True)
    ]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("budget", [LARGE, SMALL], ids=["one micro-batch", "many micro-batches"])
def test_the_gap_to_the_engine_is_measured_before_the_first_optimizer_step(
    recompute: bool, budget: Budget, make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model, samples = make_model(), make_samples()
    samples = shifted(model, samples, [0.25] * len(samples), [True] * len(samples))

    metrics, _ = trained(model, samples, budget, recompute_old_logprobs=recompute)

    assert metrics["actor/logprob_gap_mean"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["actor/logprob_gap_max"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["actor/logprob_gap_k3"] == pytest.approx(math.exp(0.25) - 1 - 0.25, abs=1e-4)
    first, _ = optimizer_step_split(len(samples), 2, seed=1)
    assert metrics["actor/logprob_gap_tokens"] == sum(samples[index].targets for index in first)


def test_samples_of_other_weights_do_not_count_in_the_gap(make_model: MakeModel, make_samples: MakeSamples) -> None:
    model, samples = make_model(), make_samples(6)
    first, _ = optimizer_step_split(6, 2, seed=1)
    fresh = {int(index) for index in first[:2]}
    shifts = [0.001 if index in fresh else 3.0 for index in range(6)]

    metrics, _ = trained(model, shifted(model, samples, shifts, [index in fresh for index in range(6)]), SMALL)

    assert metrics["actor/logprob_gap_max"] == pytest.approx(0.001, abs=1e-5)
    assert metrics["actor/logprob_gap_mean"] == pytest.approx(0.001, abs=1e-5)
    assert metrics["actor/logprob_gap_k3"] == pytest.approx(0.001**2 / 2, rel=0.02)
    assert metrics["actor/logprob_gap_tokens"] == sum(samples[index].targets for index in fresh)


@pytest.mark.parametrize("fresh_in_the_second", [True, False])
def test_without_comparable_samples_in_the_first_optimizer_step_there_is_no_gap(
    fresh_in_the_second: bool, make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model, samples = make_model(), make_samples(6)
    _, second = optimizer_step_split(6, 2, seed=1)
    comparable = [fresh_in_the_second and index in second for index in range(6)]

    metrics, _ = trained(model, shifted(model, samples, [0.5] * 6, comparable), LARGE)

    assert [name for name in metrics if "logprob_gap" in name] == []


def test_a_gradient_that_is_not_finite_vetoes_its_optimizer_step_only(
    make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model, untouched = make_model(), make_model()
    samples = make_samples(6)
    first, second = optimizer_step_split(6, 2, seed=1)
    samples[first[0]].advantages[:] = 3e38  # finite, but not its gradient

    metrics, optimizer = trained(model, samples, LARGE)

    assert metrics["actor/skipped_steps"] == 1
    assert metrics["actor/backward_steps"] == 2
    assert all(math.isfinite(value) for value in metrics.values())
    assert (optimizer.attempted, optimizer.applied) == (2, 1)
    healthy = [samples[index] for index in second]
    policy = Policy(untouched, CPU, "float32")
    alone = PolicyOptimizer(untouched, OptimizerSection(learning_rate=1e-3), 10, fused=True)
    train_step(policy, alone, healthy, StepSettings(LossSettings(), 1, 0), LARGE)
    for left, right in zip(model.parameters(), untouched.parameters(), strict=True):
        assert (left - right).abs().quantile(0.99) <= 1e-6


def test_when_every_optimizer_step_is_vetoed_the_weights_stay(make_model: MakeModel, make_samples: MakeSamples) -> None:
    model, samples = make_model(), make_samples(4)
    for sample in samples:
        sample.advantages[:] = 3e38

    metrics, _ = trained(model, samples, LARGE)

    assert metrics["actor/skipped_steps"] == 2
    assert "actor/pg_loss" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make_model().parameters(), strict=True))


def test_bfloat16_trains_towards_the_same_weights(make_model: MakeModel, make_samples: MakeSamples) -> None:
    start, exact, rounded = make_model(), make_model(), make_model()
    samples = near_policy(start, make_samples(8), 1.0)

    trained(exact, samples, LARGE)
    trained(rounded, samples, LARGE, precision="bfloat16")

    moved, agreed = [], []
    for before, left, right in zip(start.parameters(), exact.parameters(), rounded.parameters(), strict=True):
        moved.append((left - before).flatten())
        agreed.append((right - before).flatten())
    assert torch.cosine_similarity(torch.cat(moved), torch.cat(agreed), dim=0) > 0.9


def test_work_is_abandoned_between_passes(make_model: MakeModel, make_samples: MakeSamples) -> None:
    passes = 0

    def stop_at_the_third() -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise InterruptedError

    model = make_model()
    with pytest.raises(InterruptedError):
        trained(model, make_samples(8), Budget(1, 0, stop_at_the_third))
    assert passes == 3
