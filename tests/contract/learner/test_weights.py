"""FetchWeights and Export: what was trained is what arrives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from rollwire.client.weights import WeightsClient
from rollwire.policies import resolve
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_stream import WeightAssembler, receive_weights
from rollwire.serving.model_tensors import SERVING_TYPES, copy_all_in, held_digest, layouts
from rollwire.v1 import learner_pb2, weights_pb2

from .conftest import files_limited_to

FENCE = {"run_id": "run", "epoch": 1}


async def train(client: Any, samples: list[learner_pb2.TrainSample]) -> learner_pb2.TrainResponse:
    header = learner_pb2.TrainHeader(
        fence=FENCE, base_version=(await client.get_info()).version, optimizer_steps=1, loss={"clip_high": 0.2}
    )
    return await client.train(header, samples)


async def stream(client: Any, request: weights_pb2.FetchWeightsRequest) -> AsyncIterator[bytes]:
    async with WeightsClient(client.target) as source:
        async for message in source.fetch_weights(request):
            yield message


async def fetch(client: Any, model: Any, dtype: str, version: weights_pb2.WeightVersion) -> WeightAssembler:
    assembler = WeightAssembler(layouts(model, SERVING_TYPES[dtype]), version)
    async for part in stream(client, weights_pb2.FetchWeightsRequest(version=version)):
        assembler.feed(part)
    return assembler


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_reader_holds_the_digest_that_the_learner_reported(
    connect: Any, batch: Callable[..., Any], model_directory: Callable[..., Path], tied: bool, dtype: str
) -> None:
    directory = model_directory(tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=SERVING_TYPES[dtype])
    async with connect(model={"path": str(directory), "dtype": dtype}) as client:
        info = await client.get_info()
        assert held_digest(model, SERVING_TYPES[dtype]) == info.digest
        answer = await train(client, batch())
        assembler = await fetch(client, model, dtype, answer.version)

    copy_all_in(model, assembler.tensors())
    assert held_digest(model, SERVING_TYPES[dtype]) == assembler.digest == answer.digest != info.digest


async def test_only_the_present_version_is_held(connect: Any, batch: Callable[..., Any]) -> None:
    async with connect() as client:
        first = await client.get_info()
        answer = await train(client, batch())
        with pytest.raises(RollwireError) as caught:
            [part async for part in stream(client, weights_pb2.FetchWeightsRequest(version=first.version))]
        parts = [part async for part in stream(client, weights_pb2.FetchWeightsRequest())]

    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_VERSION)
    manifest = weights_pb2.FetchWeightsResponse.FromString(parts[0]).manifest
    commit = weights_pb2.FetchWeightsResponse.FromString(parts[-1]).commit
    assert manifest.version == answer.version
    assert manifest.digest == commit.digest == answer.digest != first.digest


async def test_readers_follow_by_changes_and_hold_every_version_exactly(
    connect: Any, batch: Callable[..., Any], model_directory: Callable[..., Path]
) -> None:
    """With a small learning rate few bfloat16 values move in a step; a reader that skips a step catches up as well."""
    directory = model_directory()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    learner = {"optimizer": {"learning_rate": 1e-6}}
    async with connect(model={"path": str(directory), "dtype": "bfloat16"}, learner=learner) as client:
        buffers, held, shares = HostBuffers(), None, []
        for step in range(5):
            answer = await train(client, batch(step))
            if step == 2:
                continue
            request = weights_pb2.FetchWeightsRequest(
                version=answer.version,
                have=held.version if held is not None else None,
                accepted_encodings=supported_encodings(),
            )
            assembler = WeightAssembler(layouts(model, torch.bfloat16), answer.version, base=held, buffers=buffers)
            after = await receive_weights(stream(client, request), assembler)
            if held is not None:
                held.release()
            held = after
            copy_all_in(model, held.tensors)
            assert held_digest(model, torch.bfloat16) == held.digest == answer.digest
            shares.append(assembler.received_bytes / sum(tensor.data.nbytes for tensor in held.tensors.values()))

    assert shares[0] == 1.0
    assert len(shares) == 4 and 0 < max(shares[1:]) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_export_is_a_model_directory_with_the_published_weights(
    connect: Any, dtype: str, batch: Callable[..., Any], umask_027: None
) -> None:
    async with connect(model={"path": "builtin:tiny", "dtype": dtype}) as client:
        answer = await train(client, batch())
        export = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="trained"))

    directory = Path(export.path)
    assert export.version == answer.version
    assert export.bytes == sum(file.stat().st_size for file in directory.iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == SERVING_TYPES[dtype]
    assert held_digest(model, SERVING_TYPES[dtype]) == answer.digest
    original = resolve("builtin:tiny")
    assert (
        model.generation_config.to_diff_dict() == transformers.GenerationConfig.from_pretrained(original).to_diff_dict()
    )
    tokenizer, wanted = (transformers.AutoTokenizer.from_pretrained(path) for path in (directory, original))
    assert tokenizer.get_vocab() == wanted.get_vocab()
    assert tokenizer.chat_template == wanted.chat_template
    assert [file.name for file in directory.parent.iterdir()] == ["trained"]
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o640}


async def test_a_generation_configuration_that_cannot_be_saved_is_exported_as_it_came(
    connect: Any, model_directory: Callable[..., Path]
) -> None:
    directory = model_directory()
    settings = {"do_sample": False, "temperature": 0.7, "eos_token_id": 1}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    async with connect(model={"path": str(directory)}) as client:
        export = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="odd"))

    exported = transformers.GenerationConfig.from_pretrained(export.path)
    assert (exported.temperature, exported.eos_token_id) == (0.7, 1)


async def test_an_export_can_be_repeated_but_not_replaced(connect: Any, batch: Callable[..., Any]) -> None:
    request = learner_pb2.ExportRequest(fence=FENCE, name="best")
    async with connect() as client:
        first = await client.export(request)
        again = await client.export(request)
        await train(client, batch())
        with pytest.raises(RollwireError) as caught:
            await client.export(request)
        other = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="later"))

    assert first == again
    assert caught.value.reason == Reason.ALREADY_EXISTS
    assert other.path != first.path


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
async def test_a_disk_that_refuses_an_export_is_told_and_nothing_is_left(
    connect: Any, tmp_path: Path, share: float
) -> None:
    request = learner_pb2.ExportRequest(fence=FENCE, name="best")
    async with connect(model={"path": "builtin:tiny"}) as client:
        whole = Path((await client.export(learner_pb2.ExportRequest(fence=FENCE, name="whole"))).path)
        largest = max(file.stat().st_size for file in whole.iterdir())
        with files_limited_to(int(share * largest)), pytest.raises(RollwireError, match="export best cannot") as caught:
            await client.export(request)
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.STORAGE_FAILED,
        )
        assert [path.name for path in (tmp_path / "output" / "export").iterdir()] == ["whole"]
        await client.export(request)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("No space (os error 28)")])
async def test_a_tokenizer_that_cannot_be_written_is_told_too(
    connect: Any, tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library has no exception of its own for that."""

    def refused(*arguments: Any, **named: Any) -> Any:
        raise error

    async with connect(model={"path": "builtin:tiny"}) as client:
        monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", refused)
        with pytest.raises(RollwireError, match="export best cannot be written: No space") as caught:
            await client.export(learner_pb2.ExportRequest(fence=FENCE, name="best"))
        assert caught.value.reason == Reason.STORAGE_FAILED
        assert not list((tmp_path / "output" / "export").iterdir())


async def test_a_directory_of_somebody_else_is_never_touched(connect: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "output" / "export" / "mine"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("keep")
    async with connect() as client:
        with pytest.raises(RollwireError) as caught:
            await client.export(learner_pb2.ExportRequest(fence=FENCE, name="mine"))

    assert caught.value.reason == Reason.ALREADY_EXISTS
    assert [file.name for file in foreign.iterdir()] == ["notes.txt"]


async def test_the_rest_of_an_interrupted_export_is_replaced(connect: Any, tmp_path: Path) -> None:
    rest = tmp_path / "output" / "export" / ".half.partial"
    rest.mkdir(parents=True)
    (rest / "model.safetensors").write_text("torn")
    async with connect() as client:
        export = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="half"))

    assert not rest.exists()
    transformers.AutoModelForCausalLM.from_pretrained(export.path)


@pytest.mark.parametrize("name", ["", "..", "../outside", "/absolute", "Upper"])
async def test_an_export_name_is_never_a_path(connect: Any, name: str) -> None:
    async with connect() as client:
        with pytest.raises(RollwireError) as caught:
            await client.export(learner_pb2.ExportRequest(fence=FENCE, name=name))

    assert list(caught.value.fields) == ["name"]


async def test_an_export_of_a_model_without_tokenizer_holds_none(connect: Any) -> None:
    async with connect() as client:
        assert (await client.get_info()).tokenizer_hash == ""
        export = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="bare"))

    assert not list(Path(export.path).glob("tokenizer*"))
    assert torch.float32 == getattr(torch, json.loads((Path(export.path) / "config.json").read_text())["dtype"])
