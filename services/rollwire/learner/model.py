"""The policy as the learner has it: float32 master weights, a forward pass in the configured precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from rollwire.learner.distributed import Ranks
from rollwire.learner.embedding import rows_added_to_gradient
from rollwire.learner.gradients import LossScale
from rollwire.learner.logprobs import Head, TokenScores, score_hidden, score_logits
from rollwire.learner.lora import add_adapters, served_name
from rollwire.learner.packing import Packing, find_packing
from rollwire.learner.samples import TokenBatch
from rollwire.learner.sharding import COMPUTE_TYPES, OTHER_LENGTH, Sharding, spread
from rollwire.serving.accelerator import Accelerator
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.model_files import load_model
from rollwire.serving.model_tensors import SERVING_TYPES
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
_PROBE_TOKENS: Final = 12
_SHOWN_CAUSE: Final = 300
_SAME_COMPUTATION: Final = 1e-4


class Policy:
    """A causal language model of transformers that is trained.

    With `precision` bfloat16 or float16 the forward pass runs under autocast: matrix products in that type;
    normalisation, softmax, the residual stream, parameters and gradients in float32. Dropout is off, for the policy
    that is trained must be the policy that played.

    Attributes:
        model: The model; parameters are the float32 master weights, or this rank's shards of them.
        device: Where it computes.
        vocabulary_size: Valid token ids are 0 to this minus 1.
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
            self.vocabulary_size, self._head = self.sharding.run(
                lambda: _examine(model, device, OTHER_LENGTH[precision])
            )
            self.packs = find_packing(model, device, self.sharding, self.ranks, packing, OTHER_LENGTH[precision])
        self.sharding.reshard()

    @property
    def head_is_separable(self) -> bool:
        """True if logits are computed at wanted positions alone; False if the model needs its whole forward pass."""
        return self._head is not None

    @property
    def position_limit(self) -> int | None:
        """Longest sequence that the model has positions for; None if its configuration names none."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def parameters(self) -> int:
        """Number of parameters without those of adapters; tied ones count once."""
        return sum(
            parameter.numel() for name, parameter in self.model.named_parameters() if served_name(name) is not None
        )

    @property
    def trainable_parameters(self) -> int:
        """Number of parameters that training changes; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def token_scores(self, batch: TokenBatch, temperature: float, *, entropy_gradient: bool = False) -> TokenScores:
        """Returns log-probabilities and entropies of a batch's N targets, with gradient unless it is disabled.

        Args:
            batch: Sequences and wanted predictions.
            temperature: Divisor of the logits, > 0.
            entropy_gradient: Whether the entropies carry a gradient.
        """

        def compute() -> tuple[Tensor, Tensor]:
            scores = self._scores(batch, temperature, entropy_gradient)
            return scores.logprobs, scores.entropies

        with self._precision():
            return TokenScores(*self.sharding.run(compute))

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss to the accumulated ones."""
        (loss * self.loss_scale.value if self.loss_scale.dynamic else loss).backward()  # type: ignore[no-untyped-call]

    def _scores(self, batch: TokenBatch, temperature: float, entropy_gradient: bool) -> TokenScores:
        if self._head is None:
            logits: Tensor = self.model(**batch.model_inputs).logits
            wanted = logits.flatten(0, 1).index_select(0, batch.sources)
            return score_logits(wanted, batch.targets, temperature, entropy_gradient=entropy_gradient)
        with rows_added_to_gradient(self.model):
            hidden: Tensor = self.model.base_model(**batch.model_inputs)[0]
        return score_hidden(
            self._head,
            hidden.flatten(0, 1).index_select(0, batch.sources),
            batch.targets,
            temperature,
            vocabulary=self.vocabulary_size,
            entropy_gradient=entropy_gradient,
            add_to_grad=True,
        )

    def _precision(self) -> AbstractContextManager[Any]:
        if self._compute_type is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute_type)


def load_policy(config: RunConfig, accelerator: Accelerator, ranks: Ranks | None = None) -> Policy:
    """Loads the policy, spreads it over the ranks, and checks that it can be trained.

    Raises:
        ServeError: The model is missing, broken, not causal, cannot be split, or does not give finite logits.
    """
    ranks = ranks or Ranks()
    # Where parameters are sharded, layer after layer goes from the host to the device and only its shard stays there.
    first_place = accelerator.device if ranks.meshes is None else torch.device("cpu")
    model = load_model(config.model, torch.float32, first_place, accelerator.attention)
    if config.learner.lora.rank:
        add_adapters(model, config.learner.lora, SERVING_TYPES[config.model.dtype], config.run.seed)
    sharding = spread(model, config.learner, ranks)
    try:
        policy = Policy(model, accelerator.device, config.learner.precision, ranks, sharding, config.learner.packing)
    except (RuntimeError, ValueError, ImportError, IndexError) as error:  # what torch raises for what it cannot run
        cause = " ".join(str(error).split())[:_SHOWN_CAUSE]
        raise ServeError(
            f"a forward pass of {type(model).__name__} fails on {accelerator.device} "
            f"({type(error).__name__}: {cause}); choose another learner.precision (now {config.learner.precision}) "
            f"or model.attention (now {config.model.attention})"
        ) from error
    _log.info(
        "policy loaded",
        architecture=type(model).__name__,
        parameters=policy.parameters,
        trainable_parameters=policy.trainable_parameters,
        precision=config.learner.precision,
        attention=model.config._attn_implementation,
        logits="wanted positions" if policy.head_is_separable else "all positions",
        packed=policy.packs,
        ranks=ranks.size,
    )
    return policy


def _examine(model: Any, device: torch.device, tolerance: float) -> tuple[int, Head | None]:
    """Tries a model on a random sequence.

    Returns:
        Size of the vocabulary, and the map from hidden states to logits; None if this model's logits are no such map.

    Raises:
        ServeError: The logits are not finite, or depend on later tokens.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    input_ids = torch.randint(rows, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    logits = model(input_ids=input_ids, use_cache=False).logits
    if not logits.isfinite().all():
        raise ServeError(
            "the model gives logits that are not finite; its weights are damaged, or it needs another model.attention"
        )
    half = _PROBE_TOKENS // 2
    if not _close(model(input_ids=input_ids[:, :half], use_cache=False).logits, logits[:, :half], tolerance):
        raise ServeError(
            f"the model {type(model).__name__} is not causal: later tokens change the logits of earlier ones; "
            "give a causal language model"
        )
    return min(rows, logits.shape[-1]), _find_head(model, input_ids, logits)


def _find_head(model: Any, input_ids: Tensor, logits: Tensor) -> Head | None:
    """Returns a map from hidden states to logits that gives exactly these logits, if there is one."""
    head = _head_of(model)
    if head is None or model.base_model is model:
        return None
    hidden = model.base_model(input_ids=input_ids, use_cache=False)[0]
    try:
        composed = head(hidden)
    except RuntimeError:  # shapes do not fit: something lies between hidden states and head
        return None
    return head if composed.shape == logits.shape and _close(composed, logits, _SAME_COMPUTATION) else None


def _head_of(model: Any) -> Head | None:
    """Composes output embedding and the rescaling that some architectures apply to their logits."""
    project = model.get_output_embeddings()
    if project is None:
        return None
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
    scale = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite
    return Head(project, (scale or 1.0) / (divisor or 1.0), cap or None)


def _close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    """Compares logits, relative to the largest one."""
    scale = float(right.abs().max().clamp_min(1.0))
    return bool((left - right).abs().max() <= tolerance * scale)
