"""Importance weights and masks between engine and learner, against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollwire.learner.importance import correct
from rollwire.learner.objective import ImportanceMask, ImportanceWeight, LossSettings
from rollwire.learner.ratios import RatioLevel
from rollwire.learner.samples import Sample

MASKS = [[0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 0, 1, 1]]


def make(seed: int = 0, spread: float = 0.5) -> tuple[list[Sample], list[np.ndarray]]:
    random = np.random.default_rng(seed)
    samples, old = [], []
    for number, mask in enumerate(MASKS):
        logprobs = random.normal(-2, 0.5, len(mask)).astype(np.float32)
        samples.append(
            Sample(
                f"{number}",
                np.ones(len(mask), np.int64),
                np.array(mask, bool),
                np.zeros(len(mask), np.float32),
                logprobs,
            )
        )
        old.append((logprobs + random.normal(0, spread, len(mask))).astype(np.float32))
    return samples, old


def plain_ratio(level: RatioLevel, sample: Sample, old: np.ndarray, position: int) -> float:
    trained = [index for index in range(len(old)) if sample.loss_mask[index]]
    if level is RatioLevel.TOKEN:
        members = [position]
    elif level is RatioLevel.SEGMENT_MEAN:
        members = [position]
        while members[0] - 1 in trained:
            members.insert(0, members[0] - 1)
        while members[-1] + 1 in trained:
            members.append(members[-1] + 1)
    else:
        members = trained
    total = sum(float(old[index]) - float(sample.logprobs[index]) for index in members)
    return math.exp(total if level is RatioLevel.SEQUENCE else total / len(members))


@pytest.mark.parametrize("level", list(RatioLevel))
@pytest.mark.parametrize("seed", range(3))
def test_weights_and_masks_against_loops(level: RatioLevel, seed: int) -> None:
    samples, old = make(seed)
    mask = ImportanceMask(RatioLevel.TOKEN, 0.6, 1.5)
    other = ImportanceMask(level, 0.5, math.inf)

    factors, metrics = correct(
        samples, old, LossSettings(importance_weight=ImportanceWeight(level, 1.2), importance_masks=(mask, other))
    )

    assert factors is not None
    wanted, clipped = [], 0
    for sample, logprobs, found in zip(samples, old, factors, strict=True):
        for position in range(len(logprobs)):
            if not sample.loss_mask[position]:
                assert found[position] == 0
                continue
            ratio = plain_ratio(level, sample, logprobs, position)
            own = plain_ratio(RatioLevel.TOKEN, sample, logprobs, position)
            clipped += ratio > 1.2
            wanted.append(min(ratio, 1.2) if 0.6 <= own <= 1.5 and ratio >= 0.5 else 0.0)
            assert found[position] == pytest.approx(wanted[-1], rel=1e-5)
    assert metrics["actor/is_weight_mean"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-6)
    assert metrics["actor/is_weight_clipfrac"] == pytest.approx(clipped / len(wanted))
    assert metrics["actor/train_infer_final_mask_mean"] == pytest.approx(np.mean([value > 0 for value in wanted]))
    share = sum(wanted) ** 2 / (len(wanted) * sum(value**2 for value in wanted))
    assert metrics["actor/is_weight_ess"] == pytest.approx(share, rel=1e-6)


def test_without_weight_and_masks_there_are_only_metrics() -> None:
    samples, old = make()

    factors, metrics = correct(samples, old, LossSettings())

    assert factors is None
    logs = np.concatenate([(b - a.logprobs)[a.loss_mask] for a, b in zip(samples, old, strict=True)]).astype(float)
    assert metrics["actor/train_infer_ratio_token_mean"] == pytest.approx(np.exp(logs).mean(), rel=1e-6)
    assert metrics["actor/train_infer_ratio_token_max"] == pytest.approx(np.exp(logs).max(), rel=1e-6)
    assert metrics["actor/train_infer_kl"] == pytest.approx(-logs.mean(), rel=1e-5)
    assert metrics["actor/train_infer_k3"] == pytest.approx((np.exp(logs) - 1 - logs).mean(), rel=1e-5)


def test_equal_policies_are_not_corrected() -> None:
    samples, old = make(spread=0.0)
    masks = tuple(ImportanceMask(level, 0.99, 1.01) for level in RatioLevel)

    factors, metrics = correct(
        samples, old, LossSettings(importance_weight=ImportanceWeight(RatioLevel.SEQUENCE, 2.0), importance_masks=masks)
    )

    assert factors is not None
    for sample, found in zip(samples, factors, strict=True):
        assert (found[sample.loss_mask] == 1).all()
    assert metrics["actor/is_weight_ess"] == 1
    assert metrics["actor/train_infer_kl"] == 0


def test_extreme_ratios_stay_finite_and_everything_may_be_masked() -> None:
    samples, old = make()
    old = [logprobs - np.float32(300) for logprobs in old]
    mask = ImportanceMask(RatioLevel.SEQUENCE, 0.5, 2.0)

    factors, metrics = correct(samples, old, LossSettings(importance_masks=(mask,)))

    assert factors is not None and not np.concatenate(factors).any()
    assert metrics["actor/is_weight_ess"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
