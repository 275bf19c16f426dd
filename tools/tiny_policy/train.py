"""Imitation of a player: cross-entropy against its exact move probabilities, turn by turn.

Three lessons. First single turns on as many lakes as possible, with the shortest-path moves as targets: where the paths
lie. Then whole games of the clumsy player, still with the shortest-path moves as targets: how a conversation goes on.
Last the same games with the clumsy player's own probabilities: to play no better than that player. Learning clumsiness
last, briefly and at a low rate keeps the knowledge; learnt from the start, its flat targets teach the paths badly.

All targets are probabilities, not sampled moves, so the network learns much faster than from samples.
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
_SKILL = 0.24


@dataclass(frozen=True)
class Lesson:
    """One part of the curriculum.

    Attributes:
        steps: Optimizer steps.
        turns: Games are cut after this many turns.
        tokens_per_step: Prompt and response tokens in a batch, about.
        target_skill: Probability of a shortest-path move in the targets; the rest is spread over all four moves.
        first_rate: Learning rate at the start of the lesson.
        last_rate: Learning rate at its end, reached on half a cosine.
    """

    steps: int
    turns: int
    tokens_per_step: int
    target_skill: float
    first_rate: float
    last_rate: float


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        skill: The clumsy player's probability of a shortest-path move; else any legal move, at random.
        lessons: The curriculum, in order.
        warmup_steps: Steps of linear warm-up in the first lesson.
        format_weight: Loss weight of the tokens around the action.
        observation_weight: Loss weight of the cells of later observations.
        max_gradient_norm: Gradients are scaled down to this 2-norm.
        seed: Seed of initialisation, lakes and games.
    """

    lessons: tuple[Lesson, ...] = (
        Lesson(1000, turns=1, tokens_per_step=3072, target_skill=1.0, first_rate=2e-3, last_rate=8e-4),
        Lesson(350, turns=MAX_TURNS, tokens_per_step=4096, target_skill=1.0, first_rate=1e-3, last_rate=2e-4),
        Lesson(200, turns=MAX_TURNS, tokens_per_step=4096, target_skill=_SKILL, first_rate=5e-4, last_rate=2e-5),
    )
    skill: float = _SKILL
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
    for step, (rate, batch) in enumerate(_curriculum(transcriber, settings)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / settings.warmup_steps)
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


def learning_rate(lesson: Lesson, step: int) -> float:
    """Returns the learning rate of a lesson's step counted from 0, before warm-up."""
    remaining = 0.5 * (1 + math.cos(math.pi * step / lesson.steps))
    return lesson.last_rate + (lesson.first_rate - lesson.last_rate) * remaining


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


def _curriculum(transcriber: Transcriber, settings: Settings) -> Iterator[tuple[float, Batch]]:
    """Yields learning rate and batch of every step."""
    generator = np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(1,)))
    for lesson in settings.lessons:
        batches = _batches(generator, transcriber, lesson, settings.skill)
        for step in range(lesson.steps):
            yield learning_rate(lesson, step), next(batches)


def _batches(generator: np.random.Generator, transcriber: Transcriber, lesson: Lesson, skill: float) -> Iterator[Batch]:
    """Yields batches without end; games of equal length go together, so nothing is padded."""
    while True:
        games = play(generator, draw_lakes(generator, _LAKES_PER_DRAW), skill, lesson.target_skill)
        lengths = np.minimum(games.turns, lesson.turns)
        planned = []
        for turns in range(1, lesson.turns + 1):
            rows = generator.permutation(np.flatnonzero(lengths == turns))
            count = max(1, lesson.tokens_per_step // int(transcriber.ends[turns - 1]))
            planned += [(rows[i : i + count], turns) for i in range(0, len(rows) - count + 1, count)]
        for index in generator.permutation(len(planned)):
            rows, turns = planned[index]
            yield transcriber.batch(games, rows, turns)
