"""Asks an engine to draw tokens and the learner to score them, so that the two can be compared at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.logprob_gap import PREFIX
from rollwire.coordinator.metrics import Metrics
from rollwire.coordinator.tasks import run_all
from rollwire.v1 import learner_pb2, rollout_pb2, trajectory_pb2, weights_pb2


@dataclass(frozen=True)
class Drawn:
    """One continuation.

    Attributes:
        prompt: Token ids given.
        token_ids: Token ids drawn.
        logprobs: float32, as long as `token_ids`: what the engine reports.
        versions: Distinct versions that drew them.
    """

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: NDArray[np.float32]
    versions: Sequence[weights_pb2.WeightVersion]


async def draw(
    client: RolloutClient,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    timeout_s: float,
) -> list[Drawn]:
    """Draws one continuation for each prompt, all at once, from the whole distribution.

    Args:
        client: Rollout server.
        prompts: Token ids.
        temperature: Divisor of the logits, > 0.
        max_tokens: Most tokens of one continuation.
        seed: Seed of the first one; the following ones take the following seeds.
        timeout_s: Longest time.

    Raises:
        RollwireError: The server refuses or is lost.
    """
    sampling = trajectory_pb2.SamplingSettings(
        temperature=temperature, top_p=1, max_tokens=max_tokens, logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED
    )

    async def continuation(number: int, prompt: Sequence[int]) -> Drawn:
        request = rollout_pb2.GenerateRequest(token_ids=prompt, sampling=sampling, seed=seed + number)
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[weights_pb2.WeightVersion] = []
        async for piece in client.generate(request, timeout_s=timeout_s):
            token_ids += piece.token_ids
            logprobs += piece.logprobs
            if piece.version not in versions:
                versions.append(piece.version)
        return Drawn(prompt, token_ids, np.array(logprobs, np.float32), versions)

    return await run_all(continuation(number, prompt) for number, prompt in enumerate(prompts))


def samples_of(drawn: Sequence[Drawn], advantages: Sequence[float] | None = None) -> list[learner_pb2.TrainSample]:
    """Returns continuations as samples of the learner; those without a token are left out.

    Args:
        drawn: Continuations.
        advantages: Advantage of each; None where the samples are only scored.
    """
    samples = []
    for number, item in enumerate(drawn):
        before, after = len(item.prompt), len(item.token_ids)
        if not after:
            continue
        samples.append(
            learner_pb2.TrainSample(
                sample_id=f"probe-{number}",
                token_ids=[*item.prompt, *item.token_ids],
                loss_mask=[False] * before + [True] * after,
                advantages=[0.0] * before + [advantages[number]] * after if advantages is not None else None,
                logprobs=[0.0] * before + item.logprobs.tolist(),
                comparable_logprobs=True,
            )
        )
    return samples


async def score(
    client: LearnerClient, drawn: Sequence[Drawn], *, temperature: float, timeout_s: float
) -> tuple[NDArray[np.float32], weights_pb2.WeightVersion]:
    """Returns the learner's log-probabilities of all tokens drawn, in order, and the version that it has.

    Raises:
        RollwireError: The learner refuses or is lost.
    """
    samples = samples_of(drawn)
    found: list[NDArray[np.float32]] = []
    version = weights_pb2.WeightVersion()
    async for response in client.score(samples, temperature, timeout_s=timeout_s):
        version = response.version
        for item in response.scores:
            mask = np.array(samples[len(found)].loss_mask, dtype=bool)
            found.append(np.array(item.logprobs, np.float32)[mask])
    return np.concatenate(found) if found else np.zeros(0, np.float32), version


def gap_metrics(drawn: Sequence[Drawn], scored: NDArray[np.float32]) -> Metrics:
    """Returns the gap under the names that the learner uses; `actor/logprob_gap_tokens` alone if it is not finite.

    Args:
        drawn: Continuations.
        scored: The learner's log-probabilities of all their tokens, in order.
    """
    recorded = np.concatenate([item.logprobs for item in drawn]) if drawn else np.zeros(0, np.float32)
    if not len(recorded):
        return {}
    d = scored.astype(np.float64) - recorded
    metrics: Metrics = {f"{PREFIX}tokens": float(len(d))}
    if np.isfinite(d).all():
        metrics[f"{PREFIX}mean"] = float(np.abs(d).mean())
        metrics[f"{PREFIX}max"] = float(np.abs(d).max())
        metrics[f"{PREFIX}k3"] = float((np.expm1(np.minimum(d, 20)) - d).mean())
    return metrics
