"""AdamW on float32 master weights, with schedule, clipping and a veto on gradients that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rollwire.learner.gradients import Gradients
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
        adamw: Torch's optimizer, which holds the moments of each parameter.
    """

    def __init__(
        self,
        model: Any,
        settings: OptimizerSection,
        total_steps: int,
        *,
        fused: bool,
        gradients: Gradients | None = None,
    ) -> None:
        """Creates the optimizer.

        Args:
            model: Module whose trainable parameters are stepped.
            settings: AdamW and schedule.
            total_steps: Optimizer steps of the whole run, for the schedule.
            fused: Use torch's fused kernel.
            gradients: Those of the model's trainable parameters; needed when they are spread over ranks or scaled.
        """
        self.attempted = 0
        self.applied = 0
        self._settings = settings
        self._total_steps = total_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients = gradients or Gradients(self._parameters)
        self.adamw = torch.optim.AdamW(
            decay_groups(self._parameters, settings.weight_decay),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=fused,
        )

    def step(self) -> StepOutcome:
        """Clips the gradients, steps unless their norm is not finite, and frees them."""
        rate = learning_rate(self.attempted, self._total_steps, self._settings)
        norm = self._gradients.norm()
        applied = math.isfinite(norm)
        self.attempted += 1  # first, because a step that fails may have changed some parameters
        if applied:
            self._gradients.clip(norm, self._settings.max_grad_norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        self._gradients.scale.update(applied)
        self.discard_gradients()
        self.applied += applied
        return StepOutcome(applied, norm, rate)

    def discard_gradients(self) -> None:
        """Frees the accumulated gradients."""
        self.adamw.zero_grad(set_to_none=True)


def decay_groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns AdamW's groups: matrices decay; biases and norms, which have fewer than two dimensions, do not.

    Parameters that are spread over different sets of ranks are in different groups, for one kernel takes no mixture.
    """
    groups: dict[tuple[bool, object], dict[str, Any]] = {}
    for parameter in sorted(parameters, key=lambda parameter: parameter.dim() < 2):
        vector = parameter.dim() < 2
        spread = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault((vector, spread), {"params": [], "weight_decay": 0.0 if vector else weight_decay})
        group["params"].append(parameter)
    return list(groups.values())
