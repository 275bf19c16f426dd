"""Trains on several ranks, each a process: reads scenarios from standard input, a JSON object a line, and answers each.

A process of its own, so that the libraries are loaded once and ranks are forked before any thread exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from rollwire.learner.distributed import connect, follow
from rollwire.learner.objective import ImportanceMask, ImportanceWeight, LossSettings
from rollwire.learner.ratios import RatioLevel
from rollwire.learner.samples import Sample
from rollwire.learner.seats import Seat
from rollwire.learner.step import StepSettings
from rollwire.learner.trainer import Trainer, load_trainer
from rollwire.serving.accelerator import prepare
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import configure_logging
from rollwire.v1 import weights_pb2

VOCABULARY = 61


def make_samples(seed: int, count: int) -> list[Sample]:
    """Returns random samples of skewed lengths."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(random.integers(4, 12) if number % 3 else random.integers(20, 50))
        loss_mask = random.random(length) < 0.5
        loss_mask[0], loss_mask[1] = False, True
        samples.append(
            Sample(
                sample_id=f"sample-{number}",
                token_ids=random.integers(0, VOCABULARY, length),
                loss_mask=loss_mask,
                advantages=random.normal(size=length).astype(np.float32),
                logprobs=(-4 + random.normal(size=length) * 0.3).astype(np.float32),
            )
        )
    return samples


EVERY_TERM = LossSettings(
    policy_loss="gspo",
    recompute_old_logprobs=True,
    kl_coefficient=0.1,
    importance_weight=ImportanceWeight(RatioLevel.SEGMENT_MEAN, 1.5),
    importance_masks=(ImportanceMask(RatioLevel.TOKEN, 0.01, 50.0),),
    value_clip=0.2,
)
"""An objective that needs a critic and a reference."""


def scored(trainer: Trainer, samples: list[Sample]) -> list[Sample]:
    """Returns samples with random returns, and with what critic and reference say of them."""
    random = np.random.default_rng(len(samples))
    return [
        replace(
            sample,
            returns=random.normal(size=len(sample.token_ids)).astype(np.float32),
            values=values,
            reference_logprobs=logprobs,
        )
        for sample, (values,), (logprobs, _) in zip(
            samples, trainer.predict(samples), trainer.score_reference(samples, 1.0), strict=True
        )
    ]


def train(trainer: Trainer, scenario: dict[str, Any], answer: Path) -> None:
    """Trains some steps on rank 0 and writes metrics and weights."""
    every_term = scenario.get("every_term", False)
    loss = EVERY_TERM if every_term else LossSettings(**scenario.get("loss", {}))
    settings = StepSettings(loss, scenario.get("optimizer_steps", 2), 3, train_critic=every_term)
    steps = []
    for number in range(scenario.get("steps", 3)):
        samples = make_samples(number, scenario.get("samples", 13))
        if every_term:
            samples = scored(trainer, samples)
        if number == scenario.get("poisoned_step"):
            samples[5].advantages[:] = np.finfo(np.float32).max
        done = trainer.train(samples, settings, weights_pb2.WeightVersion(lineage="test", step=number + 1))
        steps.append(done.metrics)
    scores = trainer.score(make_samples(99, 5), 1.0)
    weights = {
        name: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        for name, tensor in trainer.publisher.tensors()
    }
    np.savez(answer.with_suffix(".npz"), **weights)
    result = {
        "steps": steps,
        "logprobs": [logprobs.tolist() for logprobs, _ in scores],
        "values": [values.tolist() for (values,) in trainer.predict(make_samples(99, 5))] if every_term else [],
        "parameters": trainer.policy.parameters,
        "local_elements": sum(
            getattr(parameter, "_local_tensor", parameter).numel() for parameter in trainer.policy.model.parameters()
        ),
    }
    answer.with_suffix(".json").write_text(json.dumps(result))


def run_rank(seat: Seat, scenario: dict[str, Any], answer: Path) -> None:
    """Does what one rank does, in its own process."""
    config = RunConfig.model_validate(scenario["config"])
    accelerator = prepare(device="cpu", torch_threads=1)
    trainer = load_trainer(config, accelerator, connect(seat, config.learner, accelerator.device))
    if seat.rank == 0:
        train(trainer, scenario, answer)
    else:
        follow(trainer)


def run(scenario: dict[str, Any], port: int, number: int) -> str:
    """Runs one scenario on its ranks; returns an error, or nothing."""
    size = scenario["config"].get("learner", {}).get("world_size", 1)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_rank(
                    Seat(rank, size, rank, "127.0.0.1", port, store_exists=True, attempt=number),
                    scenario,
                    Path(scenario["answer"]),
                )
                status = 0
            except BaseException as error:
                Path(scenario["answer"]).with_suffix(f".error{rank}").write_text(f"{type(error).__name__}: {error}")
                if not isinstance(error, Exception):
                    raise
            finally:
                os._exit(status)
        children.append(child)
    status = os.waitpid(children[0], 0)[1]
    for child in children[1:]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    errors = sorted(Path(scenario["answer"]).parent.glob(Path(scenario["answer"]).name + ".error*"))
    return (
        "" if status == 0 else "; ".join(f"{file.suffix}: {file.read_text()}" for file in errors) or f"status {status}"
    )


def main() -> None:
    """Answers scenarios until the end of the input."""
    configure_logging("learner", level="ERROR")
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo of torch 2.10 writes to the standard output
    for number, line in enumerate(sys.stdin):
        print(json.dumps(run(json.loads(line), store.port, number)), flush=True, file=answers)


if __name__ == "__main__":
    main()
