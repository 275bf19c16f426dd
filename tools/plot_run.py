"""Draws the validation curve of a run from its TensorBoard events: `python tools/plot_run.py EVENT_DIR OUTPUT.png`.

Needs `pip install 'rollwire[docs]'`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

matplotlib.use("Agg")
from matplotlib import pyplot

# Success of a player that moves at random among the four legal actions, and what a perfect one reaches.
RANDOM_PLAY = 0.218


def main(event_dir: Path, output: Path) -> None:
    """Draws success over training episodes and over validation maps."""
    events = EventAccumulator(str(event_dir), size_guidance={"scalars": 0})
    events.Reload()
    training = events.Scalars("env/FrozenLake/success")
    validation = events.Scalars("val/env/FrozenLake/success")
    first = min(point.wall_time for point in training + validation)
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), dpi=120, constrained_layout=True)
    axes.plot(
        [point.step for point in training],
        [point.value for point in training],
        color="#9db4c8",
        linewidth=1.2,
        label="training episodes of the step",
    )
    axes.plot(
        [point.step for point in validation],
        [point.value for point in validation],
        color="#0b5394",
        marker="o",
        linewidth=2,
        label="validation: 512 fixed maps, temperature 1",
    )
    for point in (validation[0], validation[-1]):
        axes.annotate(
            f"{point.value:.2f}", (point.step, point.value), xytext=(0, 9), textcoords="offset points", ha="center"
        )
    axes.axhline(RANDOM_PLAY, color="#b45f06", linestyle=":", linewidth=1.2, label=f"random legal play: {RANDOM_PLAY}")
    minutes = (max(point.wall_time for point in validation) - first) / 60
    axes.set(
        xlabel="training step",
        ylabel="success rate",
        ylim=(0, 1),
        title=f"FrozenLake, four processes on two CPU cores, {minutes:.1f} minutes",
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.24), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
