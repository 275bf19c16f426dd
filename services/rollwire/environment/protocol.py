"""What an author of environments implements: no base class, no gymnasium, no torch."""

from __future__ import annotations

from typing import Any, Protocol

StepReply = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class Environment(Protocol):
    """A text environment in gymnasium's shape: the server constructs it, resets it once, steps it, and drops it.

    The constructor's keyword arguments are the environment's options. The calls of one episode never overlap, but may
    come from different threads. An exception, a hang or a result outside these rules ends the episode as failed; it
    never becomes a reward.

    These attributes are read from the class or the instance when they exist:

    - `metrics_agg_mode: dict[str, str]`: how each metric becomes the episode's value: `mean` (the default), `sum`,
      `last`, `first`, `max` or `min`.
    - `config_only_options: Collection[str]`: options that a request must not set, only the server's configuration;
      for what costs much or is code in disguise, such as a regular expression or a path.

    - `isolation: str`: `thread` or `process`; what a definition that does not say is run in. Read from the class.
    - `sessions_per_process: int`: with `process`, how many sessions may share one. Read from the class; 1 by default.

    These methods are called when they exist:

    - `render_text() -> str`: the current state for people.
    - `render_rgb() -> numpy.ndarray`: the same as a picture, uint8[height, width, 3].
    - `close() -> None`: the episode is over, or `reset` has failed; called once. Also without a reset, where the
      environment was only constructed to try it.
    """

    max_turns: int
    """Turn limit, >= 1, set by the constructor. The server truncates an episode that reaches it."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts the episode.

        Args:
            seed: 0 to 2**64 - 1. The same options, seed and actions must give the same episode.

        Returns:
            First observation, and info, of which the server reads `instructions` (str, shown once before the first
            observation), `suffix` (str, appended to the turn's prompt), and the observation as a picture, either
            `observation_png` (bytes of a PNG file, at most 1 MiB) or `observation_rgb` (uint8[height, width, 3]).
        """

    def step(self, action: str) -> StepReply:
        """Plays one turn.

        Args:
            action: The policy's whole answer, verbatim and untrusted: up to 1 MiB of any text.

        Returns:
            Observation; reward (finite); terminated; truncated; and info, of which the server reads `metrics`
            (dict[str, float], finite), `metrics_agg_mode` (as above, for metrics that the class does not declare),
            `suffix` and `observation_png` or `observation_rgb`.
        """
