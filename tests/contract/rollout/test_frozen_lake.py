"""The tiny policy on the real environment server."""

from __future__ import annotations

from typing import Any

from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.model_files import load_tokenizer
from rollwire.serving.server import Binding, serving
from rollwire.v1 import trajectory_pb2


async def test_frozen_lake_with_rolls_prompts(serve: Any) -> None:
    async with serving(EnvironmentServer(RunConfig()), Binding(), grace_s=0.2) as lake, serve() as bench:
        results = await bench.play(
            environment_tag="FrozenLake",
            environment_targets=[lake.address],
            environment_seed=42,
            sampling=trajectory_pb2.SamplingSettings(max_tokens=128),
        )
        played = [result.trajectory for result in results if result.HasField("trajectory")]
        assert len(played) == 3
        tokenizer = load_tokenizer(bench.server._config.model)
        for trajectory in played:
            assert 1 <= len(trajectory.turns) <= 10
            assert -0.1 <= trajectory.score <= 1.0
            assert "success" in trajectory.metrics
            opening = tokenizer.decode(list(trajectory.sequences[0].token_ids[: trajectory.turns[0].prompt.end]))
            assert "Turn 1:\nObservation:\n" in opening and "You have 10 actions left." in opening
            assert opening.endswith("<|im_start|>assistant\n")
