"""Start-up: what a client is told before and after, and models that cannot be trained."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch

from rollwire.client.learner import LearnerClient
from rollwire.learner import service
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.learner.service import LearnerServer
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.config.models import RunConfig
from rollwire.serving.model_files import find_tokenizer, tokenizer_hash
from rollwire.serving.server import Binding, ServeError, serving


async def test_the_learner_describes_itself(connect: Any, model_directory: Callable[..., Path]) -> None:
    async with connect(rollout={"max_episode_tokens": 2048}) as client:
        assert await client.is_ready()
        info = await client.get_info()

    assert info.model_architecture == "Qwen2ForCausalLM"
    assert info.vocabulary_size == 61
    assert info.max_sequence_tokens == 64  # the model's positions end before the longest episode
    assert (info.device, info.world_size) == ("cpu", 1)
    assert info.version.lineage.startswith("lineage-") and info.version.step == 0
    assert len(info.digest) == 32
    assert info.resident_bytes > 50 << 20
    assert list(info.policy_losses) == list(POLICY_LOSSES)
    assert info.parameters > 0


async def test_the_hash_of_the_tokenizer_is_reported(connect: Any) -> None:
    config = RunConfig.model_validate({"model": {"path": "builtin:tiny"}})
    async with connect(model={"path": "builtin:tiny"}, rollout={"max_episode_tokens": 512}) as client:
        info = await client.get_info()

    assert info.tokenizer_hash == tokenizer_hash(find_tokenizer(config.model))
    assert info.max_sequence_tokens == 512


async def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = RunConfig.model_validate({"run": {"output_dir": f"{tmp_path}/file/out"}})
    with pytest.raises(ServeError, match=r"run\.output_dir is '.*/file/out', but .*/file cannot be written \(Not a"):
        async with serving(LearnerServer(config), Binding()):
            pass


async def test_every_start_is_a_lineage_of_its_own(connect: Any) -> None:
    lineages = set()
    for _ in range(2):
        async with connect() as client:
            lineages.add((await client.get_info()).version.lineage)

    assert len(lineages) == 2


async def test_calls_while_the_model_is_loading_are_told_to_wait(
    model_directory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    plain = service.load_trainer

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(timeout=30)
        return plain(*arguments)

    monkeypatch.setattr(service, "load_trainer", slow)
    addresses: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(
        "rollwire.serving.server._write_ready_file", lambda path, address: addresses.put_nowait(address)
    )
    config = RunConfig.model_validate({"model": {"path": str(model_directory())}, "device": "cpu"})

    async def run() -> None:
        async with serving(LearnerServer(config), Binding(ready_file=Path("unused"))):
            pass

    server = asyncio.create_task(run())
    async with LearnerClient(await asyncio.wait_for(addresses.get(), 30)) as client:
        assert not await client.is_ready()
        with pytest.raises(RollwireError) as caught:
            await client.get_info()
        go_on.set()
        await server

    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_WEIGHTS)
    assert caught.value.retry_after_s is not None


async def start(directory: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": str(directory)}, "device": "cpu"})
    async with serving(LearnerServer(config), Binding()):
        pytest.fail("the server started")


def damage_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def drop_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "layers.1." in name]:
        del tensors[name]


def spoil_a_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] = float("nan")


@pytest.mark.parametrize(("change", "message"), [(drop_a_layer, "lack"), (spoil_a_value, "not finite")])
async def test_damaged_weights_are_one_line(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, model_directory: Callable[..., Path]
) -> None:
    directory = model_directory()
    damage_weights(directory, change)

    with pytest.raises(ServeError, match=message) as caught:
        await start(directory)
    assert "\n" not in str(caught.value)


async def test_a_model_that_cannot_run_as_configured_is_one_line(
    model_directory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("FlashAttention only supports\nfp16 and bf16")

    monkeypatch.setattr("transformers.Qwen2ForCausalLM.forward", fails)

    with pytest.raises(ServeError, match=r"forward pass of Qwen2ForCausalLM fails on cpu .*model.attention") as caught:
        await start(model_directory())
    assert "\n" not in str(caught.value)


async def test_a_torn_file_is_one_line(model_directory: Callable[..., Path]) -> None:
    directory = model_directory()
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with pytest.raises(ServeError, match="cannot be loaded") as caught:
        await start(directory)
    assert "\n" not in str(caught.value)


async def test_an_unknown_architecture_is_one_line(model_directory: Callable[..., Path]) -> None:
    directory = model_directory()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch", "architectures": ["None"]}))

    with pytest.raises(ServeError, match="cannot be loaded") as caught:
        await start(directory)
    assert "\n" not in str(caught.value)
