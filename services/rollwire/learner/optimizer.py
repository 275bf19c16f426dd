"""AdamW on float32 master weights, with schedule, clipping and a veto on gradients that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rollwire.learner.schedule import learning_rate
from rollwire.serving.config.sections import OptimizerSection


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        applied: False if the gradient was not finite; then the weights are as before.
        grad_norm: Global L2 norm of the gradient before clipping.
        learning_rate: Rate of the step.
    """

    applied: bool
    grad_norm: float
    learning_rate: float


class PolicyOptimizer:
    """Steps the parameters of a model by their accumulated gradients.

    Attributes:
        attempted: Optimizer steps so far, vetoed ones included; the schedule counts these.
        applied: Optimizer steps that changed the weights.
    """

    def __init__(self, model: Any, settings: OptimizerSection, total_steps: int, *, fused: bool) -> None:
        """Creates the optimizer.

        Args:
            model: Module whose trainable parameters are stepped.
            settings: AdamW and schedule.
            total_steps: Optimizer steps of the whole run, for the schedule.
            fused: Use torch's fused kernel.
        """
        self.attempted = 0
        self.applied = 0
        self._settings = settings
        self._total_steps = total_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(
            decay_groups(self._parameters, settings.weight_decay),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=fused,
        )

    def step(self) -> StepOutcome:
        """Clips the gradients, steps unless their norm is not finite, and frees them."""
        rate = learning_rate(self.attempted, self._total_steps, self._settings)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        applied = math.isfinite(norm.item())
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._settings.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self.discard_gradients()
        self.attempted += 1
        self.applied += applied
        return StepOutcome(applied, norm.item(), rate)

    def discard_gradients(self) -> None:
        """Frees the accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)


def decay_groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns AdamW's groups: matrices decay; biases and norms, which have fewer than two dimensions, do not."""
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
