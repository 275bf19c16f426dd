"""`rollwire` with a rank 1 whose second forward pass with gradients fails: a fault that no configuration causes."""

from __future__ import annotations

import os
from typing import Any

import torch

from rollwire.cli.main import main
from rollwire.learner.model import Policy

if os.environ["RANK"] == "1":
    compute, calls = Policy.token_scores, 0

    def token_scores(self: Policy, *arguments: Any, **named: Any) -> Any:
        global calls
        calls += torch.is_grad_enabled()
        if calls == 2:
            raise ArithmeticError("injected by the test")
        return compute(self, *arguments, **named)

    Policy.token_scores = token_scores  # type: ignore[method-assign]

main()
