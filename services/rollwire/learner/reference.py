"""The reference: a policy that is never trained, in host memory while nobody asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollwire.learner.distributed import Ranks
from rollwire.learner.model import Policy, load_policy
from rollwire.serving.accelerator import Accelerator
from rollwire.serving.config.models import RunConfig
from rollwire.serving.config.sections import LoraSection
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)
_HOST = torch.device("cpu")


class Reference:
    """A frozen policy.

    On an accelerator its parameters are in host memory except inside `ready`: as a whole, or, when they are sharded,
    layer by layer as they are used.

    Args:
        policy: The model; its parameters are frozen here.
    """

    def __init__(self, policy: Policy) -> None:
        policy.model.requires_grad_(False)
        self._policy = policy
        # Sharded parameters are offloaded by the sharding itself.
        self._moves = policy.device.type != "cpu" and policy.ranks.meshes is None
        if self._moves:
            self._leave()

    @contextmanager
    def ready(self) -> Iterator[Policy]:
        """Yields the policy, ready to compute."""
        if not self._moves:
            yield self._policy
            return
        try:
            self._policy.model.to(self._policy.device)
            yield self._policy
        finally:
            self._leave()

    def _leave(self) -> None:
        self._policy.model.to(_HOST)
        torch.get_device_module(self._policy.device).empty_cache()


def load_reference(config: RunConfig, accelerator: Accelerator, ranks: Ranks | None = None) -> Reference | None:
    """Loads the reference; None where the configuration needs none.

    Raises:
        ServeError: As for `model.load_policy`.
    """
    if not config.needs_reference:
        return None
    path = config.learner.reference.path or config.model.path
    learner: dict[str, object] = {"lora": LoraSection()}
    if accelerator.device.type != "cpu" and ranks is not None and ranks.meshes is not None:
        learner["cpu_offload"] = True
    changes = {
        "model": config.model.model_copy(update={"path": path}),
        "learner": config.learner.model_copy(update=learner),
    }
    _log.info("loading the reference", path=path)
    return Reference(load_policy(config.model_copy(update=changes), accelerator, ranks))
