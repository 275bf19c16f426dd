"""Whether the sequences of a pass follow each other in one row, without padding and without seeing each other.

transformers recognises such a row by position ids that start again. Attention kernels for variable lengths then compute
each sequence by itself; all others get a mask of blocks and compute the rest for nothing.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from rollwire.learner.distributed import Ranks
from rollwire.learner.sharding import Sharding
from rollwire.serving.server import ServeError

Packing = Literal["auto", "on", "off"]
"""The values of `learner.packing`."""

_VARIABLE_LENGTHS: Final = "flash"  # part of the names of attention implementations that have it
_PROBE_LENGTHS: Final = (12, 7)


def find_packing(
    model: Any, device: torch.device, sharding: Sharding, ranks: Ranks, packing: Packing, tolerance: float
) -> bool:
    """Returns whether sequences are packed, after a trial: hidden states must be those of each sequence by itself.

    Args:
        model: A causal language model.
        device: Where it computes.
        sharding: How it is spread.
        ranks: Over whom.
        packing: `auto` packs where attention has a kernel for variable lengths.
        tolerance: Largest difference that kernels may make, relative to the largest hidden state.

    Raises:
        ServeError: `on`, but sequences of this model would see each other.
    """
    varying = _VARIABLE_LENGTHS in str(getattr(model.config, "_attn_implementation", ""))
    if packing == "off" or (packing == "auto" and not varying):
        return False
    separate = sharding.run(lambda: _separate(model, device, tolerance))
    if packing == "on" and not all(ranks.gather(separate)):
        raise ServeError(
            f"learner.packing is 'on', but sequences of {type(model).__name__} in one row see each other with "
            f"model.attention={model.config._attn_implementation}; set learner.packing=off, or another model.attention"
        )
    return all(ranks.gather(separate))


def _separate(model: Any, device: torch.device, tolerance: float) -> bool:
    rows = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(rows, (1, length), generator=generator).to(device) for length in _PROBE_LENGTHS]
    positions = torch.cat([torch.arange(length) for length in _PROBE_LENGTHS])[None].to(device)
    packed = _hidden(model, input_ids=torch.cat(sequences, 1), position_ids=positions)
    alone = torch.cat([_hidden(model, input_ids=sequence) for sequence in sequences], 1)
    return bool((packed - alone).abs().max() <= tolerance * alone.abs().max().clamp_min(1.0))


def _hidden(model: Any, **inputs: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(use_cache=False, **inputs)[0]
    return hidden.float()
