"""Environments that misbehave in every way the server has to survive. Loaded by name, as a user's own would be."""

import math
import threading
import time
from typing import Any, ClassVar

import numpy as np

release = threading.Event()
"""Lets hanging environments go at the end of a test."""

log: list[str] = []
"""What environments did, in order."""


class Counting:
    """Counts its turns.

    Not part of the summary.
    """

    metrics_agg_mode: ClassVar = {"turn": "last"}

    def __init__(self, limit: int = 3, start: int = 0, note: str = "") -> None:
        if limit > 100:
            raise ValueError(f"limit is {limit}; allowed: at most 100")
        self.max_turns = limit
        self.count = start
        self.note = note

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"seed {seed} {self.note}".strip(), {"instructions": "count", "suffix": "?"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        info = {"metrics": {"turn": self.count, "late": 1.0}, "metrics_agg_mode": {"late": "sum"}, "suffix": "!"}
        return f"{self.count}: {action}", 0.25, action == "stop", False, info

    def render_text(self) -> str:
        return f"count {self.count}"

    def close(self) -> None:
        log.append(f"closed at {self.count}")


class Troublesome(Counting):
    """Does what the action or the option says."""

    def __init__(self, start_with: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.start_with = start_with

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.misbehave(self.start_with)
        if self.start_with == "long":
            return "x" * (2 << 20), {}
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.misbehave(action)
        observation, reward, *flags, info = super().step(action)
        results: dict[str, Any] = {
            "nan": (observation, math.nan, *flags, info),
            "inf": (observation, math.inf, *flags, info),
            "text reward": (observation, "1", *flags, info),
            "long": ("x" * (2 << 20), reward, *flags, info),
            "surrogate": ("\ud800", reward, *flags, info),
            "short tuple": (observation, reward),
            "none": None,
            "bad metric": (observation, reward, *flags, {"metrics": {"a b": 1.0}}),
            "nan metric": (observation, reward, *flags, {"metrics": {"a": math.nan}}),
            "many metrics": (observation, reward, *flags, {"metrics": {f"m{i}": 1.0 for i in range(300)}}),
            "bad aggregation": (observation, reward, *flags, {"metrics_agg_mode": {"a": "median"}}),
        }
        return results.get(action, (observation, reward, *flags, info))

    def misbehave(self, how: str) -> None:
        if how == "raise":
            raise ZeroDivisionError("cannot divide /srv/data/secret.txt\nby zero")
        if how == "exit":
            raise SystemExit(3)
        if how == "hang":
            log.append("hanging")
            release.wait(60)
        if how == "slow":
            log.append("slow turn")
            time.sleep(0.2)

    def render_text(self) -> str:
        self.misbehave(self.note)
        return super().render_text()

    def render_rgb(self) -> Any:
        self.misbehave(self.note)
        return np.zeros((2, 2), np.float32) if self.note == "bad picture" else np.zeros((4, 6, 3), np.uint8)


class Blind(Counting):
    """Cannot be drawn."""

    render_text = None  # type: ignore[assignment]


class WithoutTurns:
    """Has no turn limit."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, False, {}


class Required(Counting):
    """Needs an option."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if not path:
            raise RuntimeError("path is empty")


not_callable = 3
