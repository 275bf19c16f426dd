"""The network of the tiny policy, and how it is written to disk."""

from __future__ import annotations

import json
import pathlib

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

MAX_POSITIONS = 2048


def create(vocabulary_size: int, end_id: int, pad_id: int) -> Qwen2ForCausalLM:
    """Returns a freshly initialised Qwen2 with 0.9 M parameters in float32 (draws from torch's global generator)."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary_size,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end_id,
            pad_token_id=pad_id,
        )
    )


def save(model: Qwen2ForCausalLM, directory: pathlib.Path) -> None:
    """Writes config.json, model.safetensors (float32) and generation_config.json."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.to(torch.float32).save_pretrained(directory)
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    # transformers 4 and other readers look for this key; 5 writes it only inside rope_parameters.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # Written readable by the owner alone; the checkpoint goes into a wheel.
    (directory / "model.safetensors").chmod(0o644)
