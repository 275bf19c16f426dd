"""Imitation of a player: cross-entropy against its exact move probabilities, turn by turn.

Two lessons. First single turns of a perfect player on as many lakes as possible: where the shortest paths lie. Then
whole games of the clumsy player: how a conversation goes on, and to play no better than that player. The targets are
probabilities, not sampled moves, so the network learns what the player prefers much faster than from samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from tools.tiny_policy.player import MAX_TURNS, draw_lakes, play
from tools.tiny_policy.transcripts import Batch, Transcriber

# Lakes of one draw; large, so that enough games of every length come together for full batches.
_LAKES_PER_DRAW = 8192


@dataclass(frozen=True)
class Lesson:
    """One part of the curriculum.

    Attributes:
        steps: Optimizer steps.
        turns: Games are cut after this many turns.
        tokens_per_step: Prompt and response tokens in a batch, about.
        skill: Probability that the player makes a shortest-path move at a turn; else any legal move, at random.
    """

    steps: int
    turns: int
    tokens_per_step: int
    skill: float


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        lessons: The curriculum, in order.
        peak_learning_rate: Reached after the warm-up, then falling on a cosine over all lessons.
        warmup_steps: Steps of linear warm-up.
        format_weight: Loss weight of the tokens around the action.
        observation_weight: Loss weight of the cells of later observations.
        max_gradient_norm: Gradients are scaled down to this 2-norm.
        seed: Seed of initialisation, lakes and games.
    """

    lessons: tuple[Lesson, ...] = (
        Lesson(steps=900, turns=1, tokens_per_step=3072, skill=1.0),
        Lesson(steps=600, turns=MAX_TURNS, tokens_per_step=4096, skill=0.24),
    )
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 50
    format_weight: float = 0.3
    observation_weight: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 20250705

    @property
    def steps(self) -> int:
        """Optimizer steps of all lessons."""
        return sum(lesson.steps for lesson in self.lessons)


def train(model: Qwen2ForCausalLM, transcriber: Transcriber, settings: Settings, report: Callable[[str], None]) -> None:
    """Trains the model in place and reports about every 30 seconds."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    objective = Objective(model, transcriber, settings)
    started = reported = time.monotonic()
    for step, batch in enumerate(_curriculum(transcriber, settings)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        losses = objective(batch)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, settings.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = time.monotonic()
        if now - reported > 30 or step + 1 == settings.steps:
            reported = now
            parts = " ".join(f"{name} {loss.item():.4f}" for name, loss in losses.items())
            report(f"step {step + 1}/{settings.steps} after {now - started:.0f} s: {parts}")


def learning_rate(step: int, settings: Settings) -> float:
    """Returns the learning rate of a step counted from 0."""
    progress = step / settings.steps
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.peak_learning_rate * cosine * min(1.0, (step + 1) / settings.warmup_steps)


class Objective:
    """The loss of a batch, in parts."""

    def __init__(self, model: Qwen2ForCausalLM, transcriber: Transcriber, settings: Settings) -> None:
        """Keeps what every batch needs."""
        self._model, self._settings = model, settings
        self._action_ids = torch.from_numpy(transcriber.action_ids)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the weighted losses: excess over the player's entropy in nats per turn, format, observations."""
        tokens = torch.from_numpy(batch.tokens)
        slots = torch.from_numpy(batch.action_slots)
        targets = torch.from_numpy(batch.targets)
        # The forward pass in bfloat16 is a third faster on CPUs with AVX512-BF16; the weights stay float32.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self._model.model(input_ids=tokens, use_cache=False)[0]
            action = self._logits(hidden, slots).log_softmax(-1)[..., self._action_ids]
            losses = {"action": (targets * (targets.clamp_min(1e-9).log() - action)).sum(-1).mean()}
            around = torch.cat([slots - 1, slots + 1, slots + 2])
            losses["format"] = self._settings.format_weight * self._hard_loss(hidden, tokens, around)
            if len(batch.grid_slots):
                cells = torch.from_numpy(batch.grid_slots)
                losses["observation"] = self._settings.observation_weight * self._hard_loss(hidden, tokens, cells)
        return losses

    def _logits(self, hidden: Tensor, slots: Tensor) -> Tensor:
        """Returns float32[n, slots, vocabulary]: what is predicted for the tokens at `slots`."""
        logits: Tensor = self._model.lm_head(hidden[:, slots - 1])
        return logits.float()

    def _hard_loss(self, hidden: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        return functional.cross_entropy(self._logits(hidden, slots).flatten(0, 1), tokens[:, slots].flatten())


def _curriculum(transcriber: Transcriber, settings: Settings) -> Iterator[Batch]:
    generator = np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(1,)))
    for lesson in settings.lessons:
        batches = _batches(generator, transcriber, lesson)
        for _ in range(lesson.steps):
            yield next(batches)


def _batches(generator: np.random.Generator, transcriber: Transcriber, lesson: Lesson) -> Iterator[Batch]:
    """Yields batches without end; games of equal length go together, so nothing is padded."""
    while True:
        games = play(generator, draw_lakes(generator, _LAKES_PER_DRAW), lesson.skill)
        lengths = np.minimum(games.turns, lesson.turns)
        planned = []
        for turns in range(1, lesson.turns + 1):
            rows = generator.permutation(np.flatnonzero(lengths == turns))
            count = max(1, lesson.tokens_per_step // int(transcriber.ends[turns - 1]))
            planned += [(rows[i : i + count], turns) for i in range(0, len(rows) - count + 1, count)]
        for index in generator.permutation(len(planned)):
            rows, turns = planned[index]
            yield transcriber.batch(games, rows, turns)
