"""Environments that providers serve in tests, as a user would write them. Some misbehave when told to."""

import math
import threading
from typing import Any, ClassVar

log: list[str] = []
"""What environments did, in order."""

release = threading.Event()
"""Lets hanging environments go at the end of a test."""


class Counting:
    """Counts its turns."""

    metrics_agg_mode: ClassVar = {"turn": "last"}

    def __init__(self, limit: int = 5, note: str = "") -> None:
        if limit > 100:
            raise ValueError(f"limit is {limit}; allowed: at most 100")
        self.max_turns = limit
        self.note = note
        self.count = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        log.append(f"reset {seed}")
        return f"seed {seed} {self.note}".strip(), {"instructions": "count", "suffix": "?"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        log.append(f"step {self.count}")
        if action == "raise":
            raise ZeroDivisionError("cannot divide /srv/data/secret.txt\nby zero")
        if action == "exit":
            raise SystemExit(3)
        if action == "hang":
            release.wait(60)
        reward = math.nan if action == "nan" else 0.25
        observation = "x" * (2 << 20) if action == "long" else f"{self.count}: {action}"
        return observation, reward, action == "stop", False, {"metrics": {"turn": float(self.count)}}

    def render_text(self) -> str:
        return f"count {self.count}"

    def close(self) -> None:
        log.append(f"closed at {self.count}")


class Failing(Counting):
    """Fails to start, or hangs until it is released."""

    def __init__(self, how: str = "raise") -> None:
        super().__init__()
        self.how = how

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.count = seed
        if self.how == "raise":
            raise ZeroDivisionError
        if self.how == "hang":
            release.wait(60)
        return super().reset(seed)


class Space:
    """A gymnasium-shaped environment: keyword-only seed, any info, a spec in place of `max_turns`."""

    class spec:  # noqa: N801
        max_episode_steps = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return f"planet {seed}", {"prob": 1.0, "fuel": object()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"flew {action}", 1.0, False, False, {"prob": 0.5}
