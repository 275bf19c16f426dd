"""The critic: the policy's architecture with a head that predicts the return from each token on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rollwire.learner.distributed import Ranks
from rollwire.learner.embedding import rows_added_to_gradient
from rollwire.learner.gradients import LossScale
from rollwire.learner.packing import Packing, find_packing
from rollwire.learner.samples import TokenBatch
from rollwire.learner.sharding import COMPUTE_TYPES, OTHER_LENGTH, Sharding, spread
from rollwire.serving.accelerator import Accelerator
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.model_files import load_model
from rollwire.serving.server import ServeError

_log = get_logger(__name__)


class Critic:
    """A transformer whose output head is one linear map from hidden states to a value.

    Precision and spreading over ranks are as those of `model.Policy`; the head computes in float32.

    Attributes:
        model: The model; parameters are the float32 master weights, or this rank's shards of them.
        device: Where it computes.
        ranks: The processes that compute together.
        sharding: How the model is spread over them.
        loss_scale: What `backward` multiplies the loss by.
        packs: Whether the sequences of a pass go into one row, see `packing`.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        precision: str,
        ranks: Ranks | None = None,
        sharding: Sharding | None = None,
        packing: Packing = "auto",
    ) -> None:
        self.model = model
        self.device = device
        self.ranks = ranks or Ranks()
        self.sharding = sharding or Sharding()
        self.loss_scale = LossScale(precision)
        self._compute_type = COMPUTE_TYPES[precision]
        with torch.no_grad(), self._precision():
            self.packs = find_packing(model, device, self.sharding, self.ranks, packing, OTHER_LENGTH[precision])
        self.sharding.reshard()

    def values(self, batch: TokenBatch) -> Tensor:
        """Returns the predicted return from each of a batch's N targets on, given what comes before, float32[N]."""

        def compute() -> Tensor:
            with rows_added_to_gradient(self.model):
                hidden: Tensor = self.model.base_model(**batch.model_inputs)[0]
            wanted = hidden.flatten(0, 1).index_select(0, batch.sources)
            with torch.autocast(self.device.type, enabled=False):
                predicted: Tensor = self.model.get_output_embeddings()(wanted.float())
            return predicted.squeeze(-1)

        with self._precision():
            return self.sharding.run(compute)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss to the accumulated ones."""
        (loss * self.loss_scale.value if self.loss_scale.dynamic else loss).backward()  # type: ignore[no-untyped-call]

    def _precision(self) -> AbstractContextManager[Any]:
        if self._compute_type is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute_type)


def with_value_head(model: Any) -> Any:
    """Replaces the output head of a causal language model, in place, by one for values that starts at zero.

    Raises:
        ServeError: The architecture has no head that could be replaced.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise ServeError(
            f"the model {type(model).__name__} has no output head that a critic's could replace; choose another "
            "learner.critic.path, or an algorithm.advantage without a critic"
        )
    weight = head.weight
    value = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=torch.float32)
    nn.init.zeros_(value.weight)
    nn.init.zeros_(value.bias)
    model.set_output_embeddings(value)
    return model


def load_critic(config: RunConfig, accelerator: Accelerator, ranks: Ranks | None = None) -> Critic | None:
    """Loads the critic and spreads it over the ranks; None where the configuration needs none.

    Raises:
        ServeError: The model is missing, broken, or cannot be a critic.
    """
    if not config.needs_critic:
        return None
    ranks = ranks or Ranks()
    path = config.learner.critic.path or config.model.path
    section = config.model.model_copy(update={"path": path})
    first_place = accelerator.device if ranks.meshes is None else torch.device("cpu")
    model = with_value_head(load_model(section, torch.float32, first_place, accelerator.attention))
    sharding = spread(model, config.learner, ranks)
    _log.info("critic loaded", architecture=type(model).__name__, path=path)
    return Critic(model, accelerator.device, config.learner.precision, ranks, sharding, config.learner.packing)
