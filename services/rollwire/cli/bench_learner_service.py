"""The service's row of `rollwire bench learner`: the same updates through a learner's server, over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final

from rollwire.cli.bench_learner_batch import Rollout, make_model
from rollwire.cli.bench_learner_side import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Setup
from rollwire.cli.bench_ranks import learner_server
from rollwire.client.learner import LearnerClient
from rollwire.v1 import learner_pb2, trajectory_pb2

_FENCE: Final = trajectory_pb2.Fence(run_id="bench-learner", epoch=1)
_START_TIMEOUT_S: Final = 300.0


@dataclass
class ServiceRow:
    """Rounds through the service.

    Attributes:
        seconds: What the client waits for a step.
        training_s: Of that, the training step.
        publishing_s: Of that, publishing the new weights.
    """

    seconds: list[float] = field(default_factory=list)
    training_s: list[float] = field(default_factory=list)
    publishing_s: list[float] = field(default_factory=list)

    @property
    def overheads(self) -> list[float]:
        """Share of each step that is neither training nor publishing: serialising, gRPC, checks, ledgers."""
        parts = zip(self.seconds, self.training_s, self.publishing_s, strict=True)
        return [1 - (training + publishing) / total for total, training, publishing in parts]


async def measure_service(
    directory: Path, setup: Setup, batch: list[Rollout], rounds: int, say: Callable[[str], object]
) -> ServiceRow:
    """Starts a server, trains by the batch and ends it; the first step, which makes the moments, is not counted."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    say("writing the model for the service")
    make_model(setup.shape, setup.vocabulary).save_pretrained(directory / "model")
    row = ServiceRow()
    with learner_server(directory, 1, _settings(setup)) as server:
        client = LearnerClient(server.address)
        try:
            await client.wait_ready(_START_TIMEOUT_S)
            for number in range(rounds + 1):
                say(f"service, round {number} of {rounds}")
                await _train(client, batch, row)
        finally:
            await client.close()
    for values in (row.seconds, row.training_s, row.publishing_s):
        del values[0]
    return row


async def _train(client: LearnerClient, batch: list[Rollout], row: ServiceRow) -> None:
    header = learner_pb2.TrainHeader(base_version=(await client.get_info()).version, optimizer_steps=1, fence=_FENCE)
    header.loss.clip_low = header.loss.clip_high = CLIP
    began = perf_counter()
    samples = [
        learner_pb2.TrainSample(
            sample_id=f"sample-{number}",
            token_ids=item.token_ids,
            loss_mask=[place >= item.prompt_tokens for place in range(len(item.token_ids))],
            advantages=[item.advantage] * len(item.token_ids),
            logprobs=item.logprobs,
        )
        for number, item in enumerate(batch)
    ]
    answer = await client.train(header, samples)
    row.seconds.append(perf_counter() - began)
    row.training_s.append(answer.metrics["time/actor_train/train_step/total"])
    row.publishing_s.append(answer.metrics["time/actor_train/publish/total"])


def _settings(setup: Setup) -> list[str]:
    return [
        f"device={setup.device}",
        "model.dtype=bfloat16",
        f"learner.precision={setup.precision}",
        f"learner.gradient_checkpointing={str(setup.gradient_checkpointing).lower()}",
        f"learner.micro_batch_tokens={setup.micro_batch_tokens}",
        f"learner.optimizer.learning_rate={LEARNING_RATE}",
        f"learner.optimizer.max_grad_norm={MAX_GRAD_NORM}",
    ]
