"""Questions of reasoning-gym: one turn, scored by the data set."""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import numpy as np

from rollwire.environment.adapters.libraries import require, seed_of_32_bits
from rollwire.environment.answers import ANSWER_PATTERN, AnswerReader

StepReply = tuple[str, float, bool, bool, dict[str, Any]]
_DRAWING: Final = threading.Lock()
_INSTRUCTIONS = "Solve the problem. The answer must have the format <answer>your answer</answer>"


class ReasoningGym:
    """A data set of reasoning-gym: the seed decides the question, the reward is the score of the answer."""

    isolation = "process"
    sessions_per_process = 16
    config_only_options = ("dataset", "dataset_options", "action_pattern")
    max_turns = 1
    metrics_agg_mode: ClassVar = {
        "action_is_valid": "mean",
        "format_penalty": "mean",
        "score": "last",
        "success": "last",
    }

    def __init__(
        self,
        dataset: str,
        dataset_options: dict[str, Any] | None = None,
        action_pattern: str = ANSWER_PATTERN,
        format_penalty: float = 0.0,
        success_score: float = 1.0,
        instructions: str = _INSTRUCTIONS,
    ) -> None:
        """Draws one question to try the settings; call `reset` before the turn.

        Args:
            dataset: Name of the data set, such as `leg_counting`.
            dataset_options: Its settings, such as `{min_terms: 2}`; `seed` and `size` are not among them.
            action_pattern: Regular expression whose last group is the answer.
            format_penalty: Reward of a response without an answer.
            success_score: Score from which an answer counts as right.
            instructions: Instructions before the question.

        Raises:
            ImportError: reasoning-gym is not installed.
            ValueError: There is no such data set, or a setting does not fit.
        """
        self._library = require("reasoning_gym", "reasoning-gym")
        known = require("reasoning_gym.factory", "reasoning-gym").DATASETS
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"dataset is {dataset!r}, which reasoning-gym does not know{hint}")
        for name in ("seed", "size"):
            if name in (dataset_options or {}):
                raise ValueError(f"dataset_options.{name} is set; allowed: not at all, a session's seed decides")
        self._dataset, self._options = dataset, dataset_options or {}
        self._answers = AnswerReader(action_pattern)
        self.format_penalty = format_penalty
        self.success_score = success_score
        self._instructions = instructions
        try:
            self._drawn(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"dataset_options is {self._options}, which {dataset} refuses: {error}") from error
        self._entry: Any = None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draws the question of a seed, folded to 32 bits."""
        self._source, self._entry = self._drawn(seed_of_32_bits(seed))
        return self._entry["question"], {"instructions": self._instructions}

    def step(self, action: str) -> StepReply:
        """Scores the response; one without an answer costs the penalty."""
        if self._entry is None:
            raise RuntimeError("no episode has started; call reset")
        answer = self._answers.read(action)
        score = 0.0 if answer is None else float(self._source.score_answer(answer, entry=self._entry))
        penalty = self.format_penalty if answer is None else 0.0
        metrics = {
            "action_is_valid": float(answer is not None),
            "format_penalty": penalty,
            "score": score,
            "success": float(score >= self.success_score),
        }
        return "", score + penalty, True, False, {"metrics": metrics}

    def _drawn(self, seed: int) -> tuple[Any, Any]:
        with _seeded(seed):
            source = self._library.create_dataset(self._dataset, size=1, seed=seed, **self._options)
            return source, source[0]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators, from which a few data sets draw, and puts them back; for one session at a time."""
    with _DRAWING:
        states = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
