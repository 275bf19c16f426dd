from __future__ import annotations

import pytest

from rollwire.coordinator.arithmetic import batch_arithmetic, count_validations
from rollwire.serving.config import load_config


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["run.max_steps=20", "validation.every_steps=10"], 3),
        (["run.max_steps=25", "validation.every_steps=10"], 4),
        (["run.max_steps=5", "validation.every_steps=10"], 2),
        (["run.max_steps=5", "validation.every_steps=0"], 2),
        (["run.max_steps=5", "validation.every_steps=0", "validation.greedy_at_end=true"], 3),
        (["run.max_steps=5", "validation.episodes=0", "validation.greedy_at_end=true"], 0),
    ],
)
def test_how_often_the_validation_set_is_played(overrides: list[str], count: int) -> None:
    assert count_validations(load_config(None, overrides)) == count


def test_every_number_shows_where_it_comes_from() -> None:
    config = load_config(
        None,
        [
            "run.max_steps=10",
            "batch.groups_per_step=4",
            "batch.episodes_per_group=8",
            "max_staleness=1",
            "learner.optimizer_steps_per_batch=2",
            "rollout.max_episode_tokens=1000",
            "validation.episodes=64",
        ],
    )
    assert dict(batch_arithmetic(config)) == {
        "episodes per step": "4 groups x 8 episodes = 32",
        "tokens per step": "at most 32 x 1,000 tokens = 32,000",
        "optimizer steps": "10 steps x 2 = 20, about 16 episodes each",
        "episodes in the run": "10 steps x 32 = 320",
        "groups in flight": "at most 4 x (max_staleness 1 + 1) = 8",
        "validation": "2 times x 64 episodes = 128",
    }
