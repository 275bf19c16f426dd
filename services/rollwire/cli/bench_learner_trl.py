"""TRL's side of `rollwire bench learner`: its whole training loop, except that completions are given, not generated."""

from __future__ import annotations

import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollwire.cli.bench_learner_batch import Rollout
from rollwire.cli.bench_learner_side import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Setup
from rollwire.policies import resolve
from rollwire.serving.server import ServeError

_STEPS = 1_000_000


class TrlSide:
    """See `bench_learner_side.Side`.

    `GRPOTrainer.train` runs in a thread, which a callback holds before each optimizer step. What a subclass replaces is
    the method that generates and scores completions: it returns the batch, padded as TRL's own does it, prompts on the
    left and completions on the right, each to the longest of the batch. The loss is TRL's default, `dapo`, which has
    one weight for all tokens of a batch. Settings that are not named here are TRL's defaults.
    """

    def __init__(self, model: Any, setup: Setup, batch: list[Rollout]) -> None:
        if len(batch) % setup.trl_sequences:
            raise ServeError(
                f"--trl-sequences is {setup.trl_sequences}, which does not divide --sequences={len(batch)}"
            )
        self._scratch = tempfile.TemporaryDirectory(prefix="rollwire-bench-")
        self._go: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[Exception | None] = queue.Queue()
        self._trainer = _Trainer(
            inputs=_as_trl_has_it(batch, setup.device),
            model=model,
            reward_funcs=lambda completions, **rest: [0.0] * len(completions),
            args=_arguments(setup, len(batch), self._scratch.name),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * len(batch)}),
            processing_class=AutoTokenizer.from_pretrained(Path(resolve("builtin:tiny"))),
            callbacks=[_Steps(self._go, self._done)],
        )
        threading.Thread(target=self._train, daemon=True).start()
        self._wait()

    @property
    def optimizer(self) -> Any:
        """Torch's optimizer."""
        return self._trainer.optimizer.optimizer

    def step(self) -> float:
        """Updates the model by the batch and returns the loss."""
        self._trainer.losses.clear()
        self._go.put(None)
        self._wait()
        return float(torch.stack(self._trainer.losses).sum())

    def _train(self) -> None:
        try:
            self._trainer.train()
        except Exception as error:  # for the thread that waits
            self._done.put(error)

    def _wait(self) -> None:
        error = self._done.get()
        if error is not None:
            raise ServeError(f"TRL fails ({type(error).__name__}: {' '.join(str(error).split())})") from error


class _Trainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with given completions; remembers the loss of each micro-batch."""

    def __init__(self, inputs: dict[str, Tensor], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._inputs = inputs
        self.losses: list[Tensor] = []

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self._inputs)

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **named)
        self.losses.append(loss.detach())
        return loss


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Holds the loop before each optimizer step until it is told to go on."""

    def __init__(self, go: queue.Queue[None], done: queue.Queue[Exception | None]) -> None:
        self._go = go
        self._done = done

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Reports that everything before this step is done, and waits."""
        self._done.put(None)
        self._go.get()


def _arguments(setup: Setup, sequences: int, directory: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=setup.trl_sequences,
        gradient_accumulation_steps=sequences // setup.trl_sequences,
        num_generations=sequences,
        epsilon=CLIP,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=setup.gradient_checkpointing,
        bf16=setup.precision == "bfloat16",
        fp16=setup.precision == "float16",
        use_cpu=setup.device == "cpu",
        max_steps=_STEPS,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _as_trl_has_it(batch: list[Rollout], device: str) -> dict[str, Tensor]:
    """Returns the inputs of `GRPOTrainer._compute_loss` for a whole batch."""
    prompts = [torch.from_numpy(item.token_ids[: item.prompt_tokens]) for item in batch]
    completions = [torch.from_numpy(item.token_ids[item.prompt_tokens :]) for item in batch]
    logprobs = [torch.from_numpy(item.logprobs[item.prompt_tokens :]) for item in batch]

    def padded(rows: list[Tensor], side: str) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_side=side).to(device)

    completion_mask = padded([torch.ones_like(row) for row in completions], "right")
    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(row) for row in prompts], "left"),
        "completion_ids": padded(completions, "right"),
        "completion_mask": completion_mask,
        "old_per_token_logps": padded(logprobs, "right"),
        "advantages": torch.tensor([item.advantage for item in batch], device=device),
        "num_items_in_batch": completion_mask.sum(),
    }
