"""Starting the server: what a user can get wrong is one line, and nothing is served before the model is loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollwire.client.rollout import RolloutClient
from rollwire.rollout.engines import choose
from rollwire.rollout.service import RolloutServer
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, ServeError, serving
from rollwire.v1 import rollout_pb2, weights_pb2


def config(path: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": str(path)}, "device": "cpu", **sections})


async def start(settings: RunConfig) -> str:
    with pytest.raises(ServeError) as caught:
        async with serving(RolloutServer(settings), Binding(), grace_s=0.1):
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_info_describes_the_server(serve: Any) -> None:
    async with serve() as bench:
        info = await bench.client.get_info()
        assert (info.engine, info.model_architecture, info.device) == ("transformers", "Qwen2ForCausalLM", "cpu")
        assert info.dtype == weights_pb2.DATA_TYPE_FLOAT32
        assert (info.max_sequence_tokens, info.max_concurrent_sequences, info.episode_capacity) == (512, 128, 1024)
        assert info.resident_bytes > 10_000_000 and info.build_version


async def test_calls_before_the_model_is_loaded_are_told_to_wait(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = asyncio.Event(), threading.Event()
    load, loop = choose._load, asyncio.get_running_loop()

    def slow(settings: RunConfig) -> Any:
        loop.call_soon_threadsafe(loading.set)
        go_on.wait(10)
        return load(settings)

    monkeypatch.setattr(choose, "_load", slow)
    binding = Binding(ready_file=model_directory / "ready.json")

    async def use() -> None:
        async with serving(RolloutServer(config(model_directory)), binding, grace_s=0.1):
            pass

    running = asyncio.create_task(use())
    await loading.wait()
    assert binding.ready_file is not None
    address = json.loads(binding.ready_file.read_text())["address"]
    async with RolloutClient(address) as client:
        assert not await client.is_ready()
        with pytest.raises(RollwireError, match="still loading") as caught:
            # Not GetInfo: gRPC would ask again until its deadline.
            await anext(client.generate(rollout_pb2.GenerateRequest(token_ids=[1]), timeout_s=10))
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        assert caught.value.reason == Reason.NO_WEIGHTS
    go_on.set()
    await running


async def test_broken_model_directories(model_directory: Path, tmp_path: Path) -> None:
    assert "no such directory" in await start(config(tmp_path / "nowhere"))
    broken = tmp_path / "broken"
    shutil.copytree(model_directory, broken)
    (broken / "model.safetensors").write_bytes(b"nonsense")
    assert "model cannot be loaded" in await start(config(broken))
    (broken / "config.json").write_text("{")
    assert "cannot be loaded" in await start(config(broken))


async def test_a_tokenizer_without_a_chat_template_says_what_to_set(model_directory: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model_directory, bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "set model.chat_template=FILE" in await start(config(bare))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant:")
    given = RunConfig.model_validate({"model": {"path": str(bare), "chat_template": str(template)}, "device": "cpu"})
    async with (
        serving(RolloutServer(given), Binding(), grace_s=0.1) as server,
        RolloutClient(server.address) as client,
    ):
        assert await client.is_ready()


async def test_settings_that_do_not_fit_the_model(model_directory: Path) -> None:
    text = await start(config(model_directory, rollout={"max_episode_tokens": 4096}))
    assert "max_episode_tokens is 4096" in text and "2048 positions" in text
    text = await start(config(model_directory, rollout={"turn_template": "{observatoin}"}))
    assert text.startswith("rollout.turn_template: ") and "observatoin" in text
