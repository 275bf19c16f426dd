"""Models of any size for `rollwire bench rollout`: random weights, and the tokenizer of `builtin:tiny`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Final

from rollwire.policies import resolve
from rollwire.serving.config import ConfigError

_SHAPE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})")
_HEAD_SIZE: Final = 64
_QUERIES_PER_KEY: Final = 4
_INTERMEDIATE: Final = 3


def read_shape(text: str) -> tuple[int, int]:
    """Returns hidden size and number of layers of `HIDDENxLAYERS`.

    Raises:
        ConfigError: It is something else, or the hidden size is not that of whole groups of heads.
    """
    found = _SHAPE.fullmatch(text)
    unit = _HEAD_SIZE * _QUERIES_PER_KEY
    if found is None or int(found[1]) % unit:
        raise ConfigError(
            f"--shape is {text!r}; allowed: HIDDENxLAYERS, such as 512x8, where HIDDEN is a multiple of {unit}"
        )
    return int(found[1]), int(found[2])


def make_model(directory: Path, hidden_size: int, layers: int) -> None:
    """Writes a model directory; the weights are the same whenever the shape is.

    Args:
        directory: An existing directory.
        hidden_size: A multiple of 256.
        layers: Number of layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source = Path(resolve("builtin:tiny"))
    sizes = json.loads((source / "config.json").read_text()) | {
        "hidden_size": hidden_size,
        "intermediate_size": _INTERMEDIATE * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // _HEAD_SIZE,
        "num_key_value_heads": hidden_size // _HEAD_SIZE // _QUERIES_PER_KEY,
        "layer_types": ["full_attention"] * layers,
    }
    (directory / "config.json").write_text(json.dumps(sizes))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, directory / name)
