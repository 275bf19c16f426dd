"""vLLM's processes die, cannot start, or lose their parent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollwire.rollout.engine import GenerationError, GenerationRequest
from rollwire.rollout.engines import vllm_start
from rollwire.rollout.engines.vllm_settings import EngineRequest, VllmSettings, choose
from rollwire.rollout.engines.vllm_start import start_vllm_engine
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config.sections import ModelSection, VllmSection
from rollwire.serving.server import ServeError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPT = [(7 * position + 3) % 90 for position in range(41)]


def descendants(root: int) -> set[int]:
    """Returns the ids of all processes below one that have not ended."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    while fresh := {pid for pid, parent in parents.items() if parent in found | {root}} - found:
        found |= fresh
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in _state(pid)}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def engine_processes(before: set[int]) -> set[int]:
    fresh = descendants(os.getpid()) - before
    return {pid for pid in fresh if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()}


async def start(directory: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"max_sequence_tokens": 256, "max_concurrent_sequences": 16, **changes}
    return await start_vllm_engine(ModelSection(path=str(directory)), device="cpu", **settings)


async def test_a_killed_engine_is_a_clear_error_and_leaves_nothing(
    kit: Any, model_directory: Callable[[str], Path]
) -> None:
    before = descendants(os.getpid())
    engine = await start(model_directory("llama_untied"))
    request = GenerationRequest(PROMPT, kit.sampling(200), 1, 256)
    with pytest.raises(GenerationError, match="no weights yet"):
        await kit.complete(engine, request)
    tensors = kit.host_tensors(kit.make_model("llama_untied"))
    await engine.load_weights(kit.version(0), tensors)
    watching = asyncio.create_task(engine.failed())
    running = [asyncio.create_task(kit.complete(engine, request)) for _ in range(4)]
    await asyncio.sleep(0.1)
    assert not watching.done()
    processes = engine_processes(before)
    assert processes
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    for task in running:
        with pytest.raises(GenerationError, match=r"vllm's engine process has died.*; restart the rollout server"):
            await asyncio.wait_for(task, 20)
    assert "has died" in await asyncio.wait_for(watching, 20)
    with pytest.raises(GenerationError, match="has died"):
        await kit.complete(engine, request)
    with pytest.raises(RollwireError, match="has died"):
        await engine.load_weights(kit.version(1), tensors)
    await asyncio.wait_for(engine.close(), 30)
    await engine.close()
    await asyncio.sleep(0.5)
    assert {pid for pid in descendants(os.getpid()) - before if b"resource_tracker" not in _command(pid)} == set()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_splitting_a_seeded_prompt_kills_vllm_and_we_say_why(
    kit: Any, model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the CPU's settings avoid. When this test fails, vLLM has been repaired: split prompts again."""

    def splitting(request: EngineRequest, options: VllmSection) -> VllmSettings:
        settings = choose(request, options)
        arguments = {**settings.arguments, "enable_chunked_prefill": True, "max_num_batched_tokens": 64}
        return dataclasses.replace(settings, arguments=arguments)

    monkeypatch.setattr(vllm_start, "choose", splitting)
    engine = await start(model_directory("llama_untied"))
    try:
        await engine.load_weights(kit.version(0), kit.host_tensors(kit.make_model("llama_untied")))
        prompt = [position % 90 for position in range(200)]
        with pytest.raises(GenerationError, match=r"has died .*CPU Generator does not use offset"):
            await kit.complete(engine, GenerationRequest(prompt, kit.sampling(4), 1, 256))
    finally:
        await engine.close()


async def test_deterministic_engines_repeat_every_bit(kit: Any, model_directory: Callable[[str], Path]) -> None:
    model = kit.make_model("llama_untied", seed=3)
    requests = [GenerationRequest(PROMPT[: 20 + seed], kit.sampling(6), seed, 256) for seed in range(12)]
    runs = []
    for order in (1, -1):
        engine = await start(model_directory("llama_untied"), deterministic=True)
        try:
            await engine.load_weights(kit.version(0), kit.host_tensors(model))
            found = await asyncio.gather(*(kit.complete(engine, request) for request in requests[::order]))
            runs.append([(piece.token_ids, piece.logprobs) for piece in found[::order]])
        finally:
            await engine.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 24}, "cannot start: RuntimeError: .*head_dim=24"),
        ({"architectures": ["NoSuchModel"], "model_type": "no_such"}, "config.json cannot be used"),
    ],
)
async def test_models_that_vllm_cannot_run_are_one_line(
    model_directory: Callable[[str], Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    before = descendants(os.getpid())
    source = model_directory("llama_untied")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | change))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(ServeError, match=words) as raised:
        await start(tmp_path)
    assert "\n" not in str(raised.value)
    assert {pid for pid in descendants(os.getpid()) - before if b"resource_tracker" not in _command(pid)} == set()


async def test_packed_experts_are_refused(model_directory: Callable[[str], Path]) -> None:
    """In a tiny mixture model an update in place gave log-probabilities that were off by 0.1, and no error."""
    with pytest.raises(ServeError, match=r"experts.* is packed on the CPU.*use rollout.engine=transformers"):
        await start(model_directory("qwen3_moe"))


async def test_sequences_longer_than_the_model_are_refused(model_directory: Callable[[str], Path]) -> None:
    with pytest.raises(ServeError, match="max_episode_tokens is 4096, but the model has only 1024 positions"):
        await start(model_directory("llama_untied"), max_sequence_tokens=4096)


_OWNER = """
import asyncio, sys
from rollwire.rollout.engines.vllm_start import start_vllm_engine
from rollwire.serving.config.sections import ModelSection, VllmSection

async def main():
    engine = await start_vllm_engine(ModelSection(path=sys.argv[1]), device="cpu", max_sequence_tokens=64,
                                     max_concurrent_sequences=4,
                                     options=VllmSection(tensor_parallel_size=int(sys.argv[2])))
    print("ready", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("ranks", [1, 2])
async def test_processes_end_with_their_owner(
    model_directory: Callable[[str], Path], tmp_path: Path, ranks: int
) -> None:
    shared_before = {path.name for path in Path("/dev/shm").glob("*cpushm*")}
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen(
        [sys.executable, str(script), str(model_directory("llama_untied")), str(ranks)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert owner.stdout is not None
        lines = iter(owner.stdout.readline, b"")
        assert any(line.strip() == b"ready" for line in lines)
        children = descendants(owner.pid)
        assert any(b"EngineCore" in _command(pid) for pid in children)
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 60
    while alive(children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(children) == set()
    assert {path.name for path in Path("/dev/shm").glob("*cpushm*")} <= shared_before
