"""The plain side of `rollwire bench learner`: a loop as it is written with nothing but transformers and torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollwire.cli.bench_learner_batch import Rollout
from rollwire.cli.bench_learner_side import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Setup


class PlainSide:
    """See `bench_learner_side.Side`: pads to the longest of a micro-batch, takes all logits, softmax in float32."""

    def __init__(self, model: Any, setup: Setup, batch: list[Rollout]) -> None:
        self._model = model.train()
        if setup.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self._setup = setup
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=setup.device in ("cpu", "cuda")
        )
        size = setup.plain_sequences
        self._micro_batches = [batch[begin : begin + size] for begin in range(0, len(batch), size)]
        self._tokens = sum(len(item.token_ids) - item.prompt_tokens for item in batch)

    def step(self) -> float:
        """Updates the model by the batch and returns the loss."""
        total = 0.0
        for rollouts in self._micro_batches:
            loss = self._loss(rollouts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _loss(self, rollouts: list[Rollout]) -> Tensor:
        input_ids = self._padded([item.token_ids for item in rollouts])
        attended = self._padded([np.ones(len(item.token_ids), np.int64) for item in rollouts])
        mask = self._padded([np.arange(len(item.token_ids)) >= item.prompt_tokens for item in rollouts])[:, 1:]
        old = self._padded([item.logprobs for item in rollouts])[:, 1:]
        advantages = torch.tensor([[item.advantage] for item in rollouts], device=self._setup.device)
        with self._precision():
            logits = self._model(input_ids=input_ids, attention_mask=attended, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs - old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return -(surrogate * mask).sum() / self._tokens

    def _padded(self, rows: list[np.ndarray]) -> Tensor:
        return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(self._setup.device)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._setup.precision == "float32":
            return nullcontext()
        return torch.autocast(self._setup.device, dtype=getattr(torch, self._setup.precision))
