"""A learner sharded over a group of one rank, in this process; tests/integration has several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from rollwire.learner.device_memory import DeviceMemory
from rollwire.learner.distributed import Ranks, connect
from rollwire.learner.model import Policy
from rollwire.learner.objective import LossSettings
from rollwire.learner.samples import Sample
from rollwire.learner.seats import Seat
from rollwire.learner.step import StepSettings
from rollwire.learner.trainer import load_trainer
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.accelerator import prepare_for
from rollwire.serving.config.models import RunConfig
from rollwire.serving.config.sections import LearnerSection
from rollwire.v1 import weights_pb2


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield connect(Seat(), LearnerSection(cpu_offload=True), torch.device("cpu"))  # the setting that shards on one rank
    distributed.destroy_process_group()


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_a_sharded_model_that_slept_trains_on_as_if_it_had_not(
    ranks: Ranks, make_samples: Callable[..., list[Sample]], sharding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shards it has views of the shards: not told of the move, it would gather what was there before."""
    moves = []

    def move(memory: DeviceMemory, model: Any, place: torch.device) -> None:
        model._apply(torch.clone)  # as on an accelerator: every tensor is another one afterwards
        moves.append(model)

    monkeypatch.setattr(DeviceMemory, "_move_model", move)
    config = RunConfig.model_validate(
        {
            "model": {"path": "builtin:tiny"},
            "learner": {"sharding": sharding, "optimizer": {"learning_rate": 1e-2}},
            "device": "cpu",
        }
    )
    settings = StepSettings(LossSettings(), optimizer_steps=2, shuffle_seed=0)
    digests: list[list[bytes]] = []
    for sleeps in (False, True):
        trainer = load_trainer(config, prepare_for(config, torch_threads=1), ranks)
        digests.append([])
        for seed in range(3):
            version = weights_pb2.WeightVersion(lineage="line", step=seed + 1)
            digests[-1].append(trainer.train(make_samples(seed=seed), settings, version).manifest.digest)
            if sleeps:
                trainer.sleep()
                trainer.wake()

    assert len(moves) == 6
    assert digests[0] == digests[1] and len(set(digests[0])) == 3


def trained_after_a_failure(
    ranks: Ranks | None, make_samples: Callable[..., list[Sample]], passes: int | None, sharding: str = "zero2"
) -> bytes:
    """Returns the digest of weights after a step; before it another step failed after so many passes."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "builtin:tiny"},
            "learner": {"sharding": sharding, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 1e-2}},
            "device": "cpu",
        }
    )
    settings = StepSettings(LossSettings(), optimizer_steps=1, shuffle_seed=0)
    trainer = load_trainer(config, prepare_for(config, torch_threads=1), ranks)
    trainer.publish(weights_pb2.WeightVersion(lineage="line", step=0))
    version = weights_pb2.WeightVersion(lineage="line", step=1)
    if passes is not None:
        done = 0
        plain = Policy.backward

        def backward(policy: Policy, loss: torch.Tensor) -> None:
            nonlocal done
            if done == passes:
                raise ArithmeticError("out of luck")
            done += 1
            plain(policy, loss)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError, match="out of luck"):
            patch.setattr(Policy, "backward", backward)
            trainer.train(make_samples(seed=1), settings, version)
        assert not trainer.changed
    return trainer.train(make_samples(seed=0), settings, version).manifest.digest


def test_a_step_that_failed_half_way_leaves_no_gradient(make_samples: Callable[..., list[Sample]]) -> None:
    assert len({trained_after_a_failure(None, make_samples, passes) for passes in (None, 0, 1, 2)}) == 1


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_where_it_would_leave_gradients_in_gathered_parameters_the_learner_ends(
    ranks: Ranks, make_samples: Callable[..., list[Sample]], sharding: str
) -> None:
    with pytest.raises(RollwireError, match="rank 0 of the learner failed: ArithmeticError: out of luck") as raised:
        trained_after_a_failure(ranks, make_samples, 1, sharding)
    assert raised.value.reason == Reason.RANK_FAILED
