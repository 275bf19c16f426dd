"""Experts of mixture models: transformers 5 keeps those of a layer in one tensor, checkpoints and vLLM one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from rollwire.rpc.weight_stream import TensorLayout
from rollwire.serving.server import ServeError

SPLIT_MODEL_TYPES: Final = ("qwen2_moe", "qwen3_moe")
"""Architectures whose fused tensors are known to be [experts, outputs, inputs], gate before up."""

_GATE_UP: Final = ".experts.gate_up_proj"
_DOWN: Final = ".experts.down_proj"


def check_experts(model_type: str, layouts: Iterable[tuple[str, TensorLayout]]) -> None:
    """Refuses fused experts in a layout that is not known: split wrongly they would load, and compute nonsense.

    Args:
        model_type: `model_type` of the configuration.
        layouts: Name and layout of every weight.

    Raises:
        ServeError: The model has such experts.
    """
    fused = next((name for name, layout in layouts if ".experts." in name and len(layout.shape) != 2), None)
    if fused is not None and model_type not in SPLIT_MODEL_TYPES:
        raise ServeError(
            f"the vllm engine cannot update the experts of {model_type!r} (tensor {fused}); it can those of "
            f"{', '.join(SPLIT_MODEL_TYPES)}; use rollout.engine=transformers"
        )


def split_experts(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """Yields tensors under their names in checkpoints; those of experts as views into the fused ones.

    A fused `gate_up_proj` is [E, 2 * I, H], a `down_proj` [E, H, I]: E experts, I intermediate size, H hidden size.
    """
    for name, tensor in named:
        if name.endswith(_GATE_UP) and tensor.ndim == 3:
            prefix = name.removesuffix("gate_up_proj")
            for index, both_2IH in enumerate(tensor):
                gate_IH, up_IH = both_2IH.chunk(2)
                yield f"{prefix}{index}.gate_proj.weight", gate_IH
                yield f"{prefix}{index}.up_proj.weight", up_IH
        elif name.endswith(_DOWN) and tensor.ndim == 3:
            prefix = name.removesuffix("down_proj")
            for index, down_HI in enumerate(tensor):
                yield f"{prefix}{index}.down_proj.weight", down_HI
        else:
            yield name, tensor
