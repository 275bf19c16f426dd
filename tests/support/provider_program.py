"""A provider's program, as a user writes it; the environment pauses in the turns that a test names."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rollwire.client import serve_environment


class Slow:
    """Counts its turns."""

    max_turns = 3

    def __init__(self, hold: str = "") -> None:
        self.hold = Path(hold) if hold else None
        self.turns = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        while self.hold is not None and self.turns == 2 and self.hold.exists():
            (self.hold.parent / "held").touch()
            time.sleep(0.02)
        return f"turn {self.turns}", 0.5, self.turns == 3, False, {"metrics": {"turns": 1.0}}


if __name__ == "__main__":
    serve_environment(sys.argv[1], {sys.argv[2]: Slow}, capacity=int(sys.argv[3]), give_up_after_s=60)
