"""Weight updates over the wire: a stream with any fault leaves the old version serving, exactly as it was."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
import torch

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.memory_file import memory_file
from rollwire.rpc.weight_stream import HostTensor, build_manifest, stream_messages
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

Response = weights_pb2.FetchWeightsResponse


async def sample(bench: Any, seed: int = 1, max_tokens: int = 12) -> tuple[list[int], list[float], int]:
    """Draws a continuation; returns tokens, log-probabilities and the step of the weights that drew them."""
    request = rollout_pb2.GenerateRequest(
        token_ids=[3, 4, 5],
        sampling=trajectory_pb2.SamplingSettings(max_tokens=max_tokens, stop_token_ids=[0]),
        seed=seed,
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    steps = set()
    async for piece in bench.client.generate(request, timeout_s=20):
        tokens += piece.token_ids
        logprobs += piece.logprobs
        steps.add(piece.version.step)
    (step,) = steps
    return tokens, logprobs, step


async def test_ready_before_any_weights_and_generating_only_after(serve: Any) -> None:
    async with serve(active=None) as bench:
        assert await bench.client.is_ready()
        info = await bench.client.get_info()
        assert not info.HasField("active_version") and info.active_digest == b""
        for call in (sample(bench), bench.play()):
            with pytest.raises(RollwireError) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.NO_WEIGHTS)
        answer = await bench.update(0)
        assert (await sample(bench))[2] == 0
        info = await bench.client.get_info()
        assert info.active_version == answer.version == bench.version(0)
        assert info.active_digest == answer.digest


async def test_what_is_held_is_what_the_learner_published(serve: Any, weights: Any) -> None:
    async with serve(active=None) as bench:
        tensors = weights(3)
        answer = await bench.update(3)
        assert answer.digest == build_manifest(bench.version(3), tensors).digest
        assert answer.received_bytes == sum(tensor.data.nbytes for tensor in tensors.values())
        assert answer.fetch_duration.ToNanoseconds() > 0 and answer.pause_duration.ToNanoseconds() > 0


async def test_a_version_that_is_active_is_not_fetched_again(serve: Any) -> None:
    async with serve() as bench:
        first = bench.learner.fetches
        again = await bench.update(0)
        assert bench.learner.fetches == first and again.received_bytes == 0 and again.version == bench.version(0)


async def test_each_version_gives_its_own_distribution(serve: Any) -> None:
    async with serve() as bench:
        zero = await sample(bench)
        await bench.update(1)
        one = await sample(bench)
        await bench.update(0)
        assert zero == await sample(bench)
        assert one[2] == 1 and one[1] != zero[1]


def payload(messages: list[Response]) -> bytes:
    return b"".join(message.chunk.data for message in messages if message.HasField("chunk"))


def cut(messages: list[Response], at: int, *, commit: bool) -> Iterable[Response]:
    """The stream, ending after `at` payload bytes."""
    yield messages[0]
    data = payload(messages)[:at]
    for offset in range(0, len(data), 50_000):
        piece = data[offset : offset + 50_000]
        yield Response(chunk=weights_pb2.WeightChunk(offset=offset, crc32=zlib.crc32(piece), data=piece))
    if commit:
        yield messages[-1]


def changed(messages: list[Response], place: int, *, checksum: bool) -> list[Response]:
    """The stream with one bit of its payload flipped; with `checksum` the chunk's CRC-32 fits the damage."""
    found = [Response.FromString(message.SerializeToString()) for message in messages]
    for message in found:
        chunk = message.chunk
        if message.HasField("chunk") and chunk.offset <= place < chunk.offset + len(chunk.data):
            data = bytearray(chunk.data)
            data[place - chunk.offset] ^= 4
            chunk.data = bytes(data)
            if checksum:
                chunk.crc32 = zlib.crc32(chunk.data)
    return found


def edited(messages: list[Response], edit: Any) -> list[Response]:
    """The stream with its manifest changed."""
    first = Response.FromString(messages[0].SerializeToString())
    edit(first.manifest)
    return [first, *messages[1:]]


def set_digest(commit: Response) -> Response:
    found = Response.FromString(commit.SerializeToString())
    found.commit.digest = bytes(32)
    return found


def swapped(messages: list[Response]) -> list[Response]:
    return [messages[0], messages[2], messages[1], *messages[3:]]


async def refused(bench: Any, step: int, saying: str = "") -> Reason | str:
    with pytest.raises(RollwireError) as caught:
        await bench.update(step)
    assert caught.value.message and saying in caught.value.message
    return caught.value.reason


async def test_streams_cut_at_and_around_every_tensor_boundary(serve: Any) -> None:
    async with serve() as bench:
        before = await sample(bench)
        manifest = bench.learner.messages(1)[0].manifest
        ends = [spec.payload_offset + spec.payload_bytes for spec in manifest.tensors]
        total = manifest.payload_bytes
        places = sorted({end + shift for end in [0, *ends] for shift in (-1, 0, 1) if 0 <= end + shift < total})
        for number, place in enumerate(places):
            bench.learner.fault = lambda messages, place=place, commit=bool(number % 2): cut(
                messages, place, commit=commit
            )
            assert await refused(bench, 1) == Reason.WEIGHTS_CORRUPT, place
        info = await bench.client.get_info()
        assert info.active_version == bench.version(0)
        assert before == await sample(bench)
        # The same server takes the next good stream.
        bench.learner.fault = lambda messages: messages
        await bench.update(1)


async def test_bits_flipped_at_and_around_every_tensor_boundary(serve: Any) -> None:
    async with serve() as bench:
        before = await sample(bench)
        manifest = bench.learner.messages(1)[0].manifest
        ends = [spec.payload_offset + spec.payload_bytes for spec in manifest.tensors]
        total = manifest.payload_bytes
        places = sorted({end + shift for end in [0, *ends] for shift in (-1, 0, 1) if 0 <= end + shift < total})
        for number, place in enumerate(places):
            # With a checksum that fits the damage only the digest of a tensor can tell, and it names that tensor.
            checksum = bool(number % 2)
            damaged = next(spec.name for spec, end in zip(manifest.tensors, ends, strict=True) if place < end)
            bench.learner.fault = lambda messages, place=place, checksum=checksum: changed(
                messages, place, checksum=checksum
            )
            assert await refused(bench, 1, damaged if checksum else "") == Reason.WEIGHTS_CORRUPT, place
        info = await bench.client.get_info()
        assert info.active_version == bench.version(0)
        assert before == await sample(bench)
        bench.learner.fault = lambda messages: messages
        await bench.update(1)


async def test_damaged_and_disordered_streams(serve: Any) -> None:
    async with serve() as bench:
        before = await sample(bench)
        digest = (await bench.client.get_info()).active_digest
        total = bench.learner.messages(1)[0].manifest.payload_bytes
        faults: dict[str, Any] = {
            "nothing": lambda m: [],
            "manifest alone": lambda m: m[:1],
            "no commit": lambda m: m[:-1],
            "no manifest": lambda m: m[1:],
            "two manifests": lambda m: [m[0], *m],
            "a missing chunk": lambda m: [*m[:3], *m[4:]],
            "a chunk twice": lambda m: [*m[:3], m[2], *m[3:]],
            "chunks out of order": swapped,
            "commit of another version": lambda m: [*m[:-1], set_digest(m[-1])],
            "something after the commit": lambda m: [*m, m[-1]],
            "an empty message": lambda m: [m[0], Response(), *m[1:]],
            "another version": lambda m: bench.learner.messages(2),
            "a wrong offset": lambda m: edited(m, lambda x: setattr(x.tensors[1], "payload_offset", 1)),
            "a wrong size": lambda m: edited(m, lambda x: setattr(x.tensors[1], "payload_bytes", 1)),
            "a wrong digest of all": lambda m: edited(m, lambda x: setattr(x, "digest", bytes(32))),
            "a wrong digest of one": lambda m: edited(m, lambda x: setattr(x.tensors[0], "digest", bytes(32))),
        }
        for place in (0, total // 3, total - 1):
            faults[f"bit of byte {place}"] = lambda m, place=place: changed(m, place, checksum=False)
            faults[f"bit of byte {place}, checksum too"] = lambda m, place=place: changed(m, place, checksum=True)
        for name, fault in faults.items():
            bench.learner.fault = fault
            assert await refused(bench, 1) == Reason.WEIGHTS_CORRUPT, name
            info = await bench.client.get_info()
            assert (info.active_version, info.active_digest) == (bench.version(0), digest), name
        assert before == await sample(bench)


async def test_weights_of_another_model(serve: Any, weights: Any) -> None:
    def stream(tensors: dict[str, HostTensor]) -> list[Response]:
        return list(
            stream_messages(build_manifest(bench.version(1), tensors), [tensor.data for tensor in tensors.values()])
        )

    async with serve() as bench:
        good = weights(1)
        name, tensor = next(iter(good.items()))
        half = torch.zeros(tensor.shape, dtype=torch.bfloat16).view(torch.uint8).numpy()
        turned = HostTensor(tensor.dtype, tensor.shape[::-1], tensor.data)
        others = {
            "missing": {key: value for key, value in good.items() if key != name},
            "extra": {**good, "lm_head.weight": tensor},
            "renamed": {("x" if key == name else key): value for key, value in good.items()},
            "wrong shape": {**good, name: turned},
            "wrong type": {
                **good,
                name: HostTensor(weights_pb2.DATA_TYPE_BFLOAT16, tensor.shape, memoryview(half).cast("B")),
            },
        }
        for what, tensors in others.items():
            bench.learner.fault = lambda messages, tensors=tensors: stream(tensors)
            named = {"extra": "lm_head.weight", "renamed": "x"}.get(what, name)
            assert await refused(bench, 1, named) == Reason.WEIGHTS_MISMATCH, what
        assert (await sample(bench))[2] == 0


async def test_sources_that_cannot_be_used(serve: Any) -> None:
    async with serve() as bench:
        with pytest.raises(RollwireError) as caught:
            await bench.update(1, source=weights_pb2.WeightSource(target="127.0.0.1:1"))
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            Reason.WEIGHT_SOURCE_UNAVAILABLE,
        )
        with pytest.raises(RollwireError) as caught:
            await bench.update(1, version=weights_pb2.WeightVersion(lineage="other", step=1))
        assert caught.value.reason == Reason.UNKNOWN_VERSION
        assert (await sample(bench))[2] == 0


async def test_a_source_that_dies_in_the_middle(serve: Any) -> None:
    def dying(messages: list[Response]) -> Iterable[Response]:
        yield from messages[:3]
        raise RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "going away")

    async with serve() as bench:
        bench.learner.fault = dying
        assert await refused(bench, 1) == Reason.WEIGHT_SOURCE_UNAVAILABLE
        assert (await sample(bench))[2] == 0


async def test_nothing_is_served_after_a_load_that_went_wrong_until_one_succeeds(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as bench:
        engine = bench.server._servicer.parts.policy.engine
        load = engine.load_weights

        async def damaged(*arguments: Any) -> bytes:
            await load(*arguments)
            return bytes(32)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "load_weights", damaged)
            assert await refused(bench, 1) == Reason.WEIGHTS_CORRUPT
        assert not (await bench.client.get_info()).HasField("active_version")
        with pytest.raises(RollwireError) as caught:
            await sample(bench)
        assert caught.value.reason == Reason.NO_WEIGHTS
        await bench.update(1)
        assert (await sample(bench))[2] == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": weights_pb2.WeightVersion(step=1)}, "version.lineage"),
        ({"source": weights_pb2.WeightSource()}, "source"),
        ({"source": weights_pb2.WeightSource(target="nowhere")}, "source.target"),
        ({"fence": trajectory_pb2.Fence(epoch=1)}, "fence.run_id"),
        ({"fence": trajectory_pb2.Fence(run_id="run")}, "fence.epoch"),
    ],
)
async def test_fields_outside_their_range(serve: Any, changes: dict[str, Any], field: str) -> None:
    async with serve() as bench:
        with pytest.raises(RollwireError) as caught:
            await bench.update(1, **changes)
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT and list(caught.value.fields) == [field]


async def test_one_update_at_a_time_and_the_same_one_is_joined(serve: Any) -> None:
    async with serve() as bench:
        bench.learner.hold.clear()
        first = asyncio.create_task(bench.update(1))
        while bench.learner.fetches < 2:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(bench.update(1))
        assert (await sample(bench))[2] == 0  # the old version generates while the new one arrives
        with pytest.raises(RollwireError) as caught:
            await bench.update(2)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, Reason.UPDATE_IN_PROGRESS)
        bench.learner.hold.set()
        assert await first == await second
        assert bench.learner.fetches == 2


async def test_a_caller_that_gives_up_does_not_stop_the_update(serve: Any) -> None:
    async with serve() as bench:
        bench.learner.hold.clear()
        first = asyncio.create_task(bench.update(1))
        while bench.learner.fetches < 2:
            await asyncio.sleep(0.005)
        first.cancel()
        bench.learner.hold.set()
        assert (await bench.update(1)).version == bench.version(1)
        assert bench.learner.fetches == 2


async def test_running_generations_finish_under_the_old_version(serve: Any) -> None:
    async with serve() as bench:
        bench.server._servicer.parts.updater._drain_s = 60.0
        running = asyncio.create_task(sample(bench, max_tokens=300))
        while (await bench.client.get_info()).generated_tokens == 0:
            await asyncio.sleep(0.001)
        await bench.update(1)
        tokens, _, step = await running
        assert step == 0 and len(tokens) == 300
        assert (await sample(bench))[2] == 1


async def test_generations_that_do_not_finish_in_time_are_aborted(serve: Any) -> None:
    async with serve() as bench:
        updater = bench.server._servicer.parts.updater
        updater._drain_s = 0.0
        sampling = trajectory_pb2.SamplingSettings(max_tokens=500, stop_token_ids=[0])
        generations: list[list[rollout_pb2.GenerateResponse]] = []
        updated = asyncio.Event()

        async def generate_on(seed: int) -> None:
            """One generation after the other, so that the update meets some however fast either is."""
            while not updated.is_set():
                request = rollout_pb2.GenerateRequest(token_ids=[3, 4], sampling=sampling, seed=seed)
                generations.append([piece async for piece in bench.client.generate(request, timeout_s=60)])

        generating = [asyncio.create_task(generate_on(seed)) for seed in range(1, 5)]
        await anext(bench.client.generate(rollout_pb2.GenerateRequest(token_ids=[3], sampling=sampling), timeout_s=60))
        await bench.update(1)
        updated.set()
        await asyncio.gather(*generating)
        aborted = [pieces for pieces in generations if pieces[-1].stop_reason == trajectory_pb2.STOP_REASON_ABORTED]
        assert aborted
        for pieces in aborted:
            assert {piece.version.step for piece in pieces if piece.token_ids} <= {0}
            assert sum(len(piece.token_ids) for piece in pieces) < 500


async def test_a_replaced_coordinator_cannot_change_weights(serve: Any) -> None:
    async with serve() as bench:
        await bench.update(1, fence=trajectory_pb2.Fence(run_id="run", epoch=3))
        with pytest.raises(RollwireError) as caught:
            await bench.update(2, fence=trajectory_pb2.Fence(run_id="run", epoch=2))
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, Reason.FENCED)
        assert (await sample(bench))[2] == 1


async def test_a_version_that_there_is_no_room_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        before = await sample(bench)
        await bench.update(1)
        await bench.update(0)  # both buffers have been made by now
        buffers = bench.server._servicer.parts.updater._buffers
        monkeypatch.setattr(buffers, "_free", [])
        monkeypatch.setattr(buffers, "_allocate", lambda _: memory_file(1 << 52))
        with pytest.raises(RollwireError, match=r"was not fetched: the weights need \d+ MiB") as caught:
            await bench.update(2)
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.reason == Reason.HOST_MEMORY_EXHAUSTED and caught.value.retry_after_s
        assert await sample(bench) == before
        monkeypatch.undo()
        await bench.update(2)
        assert (await sample(bench))[2] == 2
