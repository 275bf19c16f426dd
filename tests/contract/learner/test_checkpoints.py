"""SaveCheckpoint and LoadCheckpoint over gRPC, one rank."""

from __future__ import annotations

import json
import pickletools
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from rollwire.client.learner import LearnerClient
from rollwire.learner.checkpoint_files import CheckpointDirectory
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2

from .conftest import files_limited_to

Batch = Callable[..., list[learner_pb2.TrainSample]]
FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)


async def train(client: LearnerClient, samples: list[learner_pb2.TrainSample], **header: object) -> bytes:
    """Runs the next step and returns the digest of its weights."""
    version = (await client.get_info()).version
    request = learner_pb2.TrainHeader(base_version=version, optimizer_steps=2, fence=FENCE, **header)
    request.loss.clip_low = request.loss.clip_high = 0.2
    return (await client.train(request, samples)).digest


async def save(
    client: LearnerClient, name: str, keep: int = 0, run_id: str = "run"
) -> learner_pb2.SaveCheckpointResponse:
    fence = trajectory_pb2.Fence(run_id=run_id, epoch=1)
    return await client.save_checkpoint(learner_pb2.SaveCheckpointRequest(fence=fence, name=name, keep=keep))


async def load(client: LearnerClient, name: str, **fields: object) -> learner_pb2.LoadCheckpointResponse:
    return await client.load_checkpoint(learner_pb2.LoadCheckpointRequest(fence=FENCE, name=name, **fields))


def tensors(directory: Path) -> dict[str, bytes]:
    """All tensors of a checkpoint of one rank."""
    found = {}
    for file in directory.glob("*.safetensors"):
        found.update({name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()})
    return found


async def test_what_follows_a_load_is_bit_for_bit_what_followed_then(connect: Callable, batch: Batch) -> None:
    async with connect() as client:
        await train(client, batch(1))
        saved = await save(client, "one")
        then = [await train(client, batch(seed)) for seed in (2, 3)]
        await save(client, "three")
    async with connect() as client:
        assert (await load(client, "one")).version == saved.version
        again = [await train(client, batch(seed)) for seed in (2, 3)]
        await save(client, "three-again")
    assert again == then
    directory = Path(saved.path).parent
    first, second = tensors(directory / "three"), tensors(directory / "three-again")
    assert first == second
    assert {name.split(".")[0] for name in first} == {"policy", "policy_optimizer"}
    assert any(name.endswith(".exp_avg_sq") for name in first)
    states = [json.loads((directory / name / "state.json").read_text()) for name in ("three", "three-again")]
    for part in ("models", "tensors", "generators"):
        assert states[0][part] == states[1][part]


async def test_the_critic_comes_back_too(connect: Callable, batch: Batch) -> None:
    def with_returns(seed: int) -> list[learner_pb2.TrainSample]:
        samples = batch(seed)
        for sample in samples:
            sample.returns.extend([0.5] * len(sample.token_ids))
        return samples

    async with connect(algorithm={"advantage": "gae"}) as client:
        await train(client, with_returns(1), train_critic=True)
        await save(client, "one")
        await train(client, with_returns(2), train_critic=True)
        then = tensors(Path((await save(client, "then")).path))
        await load(client, "one")
        await train(client, with_returns(2), train_critic=True)
        again = tensors(Path((await save(client, "again")).path))
    assert again == then
    assert any(name.startswith("critic_optimizer.") for name in then)
    async with connect() as client:
        with pytest.raises(RollwireError, match="it has critic and policy, this learner has policy") as raised:
            await load(client, "one")
        assert raised.value.reason == "CHECKPOINT_MISMATCH"


async def test_adapters_come_back_and_their_base_is_not_saved(
    connect: Callable, batch: Batch, model_directory: Callable[..., Path]
) -> None:
    lora = {"lora": {"rank": 4}}
    async with connect(learner=lora) as client:
        await train(client, batch(1))
        saved = await save(client, "one")
        then = await train(client, batch(2))
    async with connect(learner=lora) as client:
        await load(client, "one")
        assert await train(client, batch(2)) == then
    names = {name for name in tensors(Path(saved.path)) if name.startswith("policy.")}
    assert names and all(".lora_" in name for name in names)
    other = model_directory()
    config = transformers.AutoConfig.from_pretrained(other)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(other)
    async with connect(learner=lora, model={"path": str(other)}) as client:
        with pytest.raises(RollwireError, match="the weights of its policy that are not trained are others") as raised:
            await load(client, "one")
        assert raised.value.reason == "CHECKPOINT_MISMATCH"


async def test_no_file_is_a_pickle(connect: Callable, batch: Batch, umask_027: None) -> None:
    async with connect() as client:
        await train(client, batch())
        path = Path((await save(client, "one")).path)
    assert sorted(file.suffix for file in path.iterdir()) == [".json", ".json", ".safetensors"]
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
    for file in path.iterdir():
        with pytest.raises(ValueError):
            list(pickletools.genops(file.read_bytes()))


async def test_the_last_answer_can_be_repeated_after_a_restart(connect: Callable, batch: Batch) -> None:
    """I1: a coordinator that did not get the answer asks the new learner again, and the step is not executed twice."""
    async with connect() as client:
        base = (await client.get_info()).version
        digest = await train(client, batch(1))
        await save(client, "one")
    async with connect() as client:
        await load(client, "one")
        header = learner_pb2.TrainHeader(base_version=base, optimizer_steps=2, fence=FENCE)
        header.loss.clip_low = header.loss.clip_high = 0.2
        answer = await client.train(header, batch(1))
        assert answer.repeated_answer and answer.digest == digest and answer.version.step == 1
        with pytest.raises(RollwireError) as raised:
            await client.train(header, batch(2))
        assert raised.value.reason == "STEP_CONFLICT"
        assert (await client.get_info()).version.step == 1


async def test_a_new_lineage_begins_with_the_saved_weights(connect: Callable, batch: Batch) -> None:
    async with connect() as client:
        base = (await client.get_info()).version
        digest = await train(client, batch(1))
        await save(client, "one")
        loaded = await load(client, "one", new_lineage=True)
        assert loaded.digest == digest and loaded.version.step == 0 and loaded.version.lineage != base.lineage
        header = learner_pb2.TrainHeader(base_version=base, optimizer_steps=2, fence=FENCE)
        with pytest.raises(RollwireError) as raised:
            await client.train(header, batch(1))
        assert raised.value.reason == "WRONG_VERSION"


def _flip(file: Path) -> str:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return "was changed"


def _truncate(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:-1])
    return "has .* bytes instead of" if file.name != "manifest.json" else "was changed"


def _delete(file: Path) -> str:
    file.unlink()
    return "is missing"


@pytest.mark.parametrize("damage", [_flip, _truncate, _delete])
@pytest.mark.parametrize("file", ["shard-00001-model-00001-of-00001.safetensors", "state.json", "manifest.json"])
async def test_damage_is_named_and_changes_nothing(
    connect: Callable, batch: Batch, damage: Callable[[Path], str], file: str
) -> None:
    async with connect() as client:
        path = Path((await save(client, "zero")).path)
        await train(client, batch(1))
        await save(client, "one")
        before = await client.get_info()
        what = damage(path / file)
        with pytest.raises(RollwireError, match=f"checkpoint zero is damaged: {file} {what}") as raised:
            await load(client, "zero")
        assert (raised.value.code.name, raised.value.reason) == ("DATA_LOSS", "CHECKPOINT_CORRUPT")
        assert raised.value.metadata["file"] == file
        after = await client.get_info()
        assert (after.version, after.digest) == (before.version, before.digest)
        digest = await train(client, batch(2))
        await load(client, "one")
        assert await train(client, batch(2)) == digest


async def test_every_flipped_byte_is_found(connect: Callable) -> None:
    async with connect() as client:
        path = Path((await save(client, "zero")).path)
        shard = next(path.glob("*.safetensors"))
        data = shard.read_bytes()
        for place in (0, 9, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 0x80
            shard.write_bytes(changed)
            with pytest.raises(RollwireError, match=shard.name):
                await load(client, "zero")
        shard.write_bytes(data)
        await load(client, "zero")


async def test_another_model_is_refused(connect: Callable, model_directory: Callable[..., Path]) -> None:
    async with connect(model={"path": str(model_directory())}) as client:
        await save(client, "zero")
    async with connect(model={"path": str(model_directory(tie_word_embeddings=True))}) as client:
        before = await client.get_info()
        with pytest.raises(RollwireError, match=r"its tensor policy\.lm_head\.weight is float32") as raised:
            await load(client, "zero")
        assert (raised.value.code.name, raised.value.reason) == ("FAILED_PRECONDITION", "CHECKPOINT_MISMATCH")
        assert (await client.get_info()).digest == before.digest


async def test_a_load_that_fails_half_way_begins_another_lineage(
    connect: Callable, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: such as a disk that breaks after the digests were compared."""

    def breaks(*arguments: object, **named: object) -> None:
        error = OSError(5, "Input/output error")
        raise CheckpointException("read", {0: (error, traceback.extract_stack())})

    async with connect() as client:
        await save(client, "zero")
        await train(client, batch(1))
        before = await client.get_info()
        with monkeypatch.context() as patch:
            patch.setattr("rollwire.learner.checkpoint.load_tensors", breaks)
            with pytest.raises(RollwireError, match=r"a shard cannot be read \(.*Input/output error") as raised:
                await load(client, "zero")
        assert raised.value.reason == "CHECKPOINT_CORRUPT"
        after = await client.get_info()
        assert after.version.lineage != before.version.lineage and after.version.step == 0
        await train(client, batch(2))
        loaded = await load(client, "zero")
        assert loaded.version.step == 0 and loaded.version.lineage == before.version.lineage


async def test_names_and_versions_are_checked(connect: Callable, batch: Batch) -> None:
    async with connect() as client:
        saved = await save(client, "zero")
        assert await save(client, "zero") == saved
        with pytest.raises(RollwireError, match=r"there is no checkpoint one in .*; there are: zero") as raised:
            await load(client, "one")
        assert raised.value.reason == "UNKNOWN_CHECKPOINT"
        with pytest.raises(RollwireError) as raised:
            await load(client, "../zero")
        assert raised.value.reason == "INVALID_FIELD"
        with pytest.raises(RollwireError, match=r"it holds .*@0, not .*@7") as raised:
            await load(client, "zero", version=weights_pb2.WeightVersion(lineage=saved.version.lineage, step=7))
        assert raised.value.reason == "CHECKPOINT_MISMATCH"
        await train(client, batch())
        with pytest.raises(RollwireError) as raised:
            await save(client, "zero")
        assert raised.value.reason == "ALREADY_EXISTS"


async def test_a_damaged_checkpoint_is_written_again(connect: Callable) -> None:
    async with connect() as client:
        path = Path((await save(client, "zero")).path)
        _flip(path / "state.json")
        await save(client, "zero")
        await load(client, "zero")


async def test_foreign_tensors_in_the_directory_are_named_and_not_loaded(connect: Callable, batch: Batch) -> None:
    """Whoever reads the directory takes all files with tensors for the checkpoint's."""
    async with connect() as client:
        zero = Path((await save(client, "zero")).path)
        before = await client.get_info()
        digest = await train(client, batch(1))
        one = Path((await save(client, "one")).path)
        shutil.copy(next(one.glob("*.safetensors")), zero / "zzz.safetensors")
        with pytest.raises(RollwireError, match=r"zero is damaged: zzz\.safetensors is not in its manifest") as raised:
            await load(client, "zero")
        assert raised.value.reason == "CHECKPOINT_CORRUPT"
        assert (await client.get_info()).digest == digest
        (zero / "zzz.safetensors").unlink()
        assert (await load(client, "zero")).digest == before.digest


async def test_what_another_build_or_somebody_else_wrote_is_not_replaced(
    connect: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect() as client:
        with monkeypatch.context() as newer:
            newer.setattr("rollwire.learner.checkpoint_manifest.FORMAT", 2)
            root = Path((await save(client, "newer")).path).parent
        (root / "file").write_text("mine")
        for name, why in (("newer", "has format 2"), ("file", "is no directory")):
            with pytest.raises(RollwireError, match=f"{name} exists.*{why}.*; choose another name") as raised:
                await save(client, name)
            assert raised.value.reason == "ALREADY_EXISTS"
        assert (root / "file").read_text() == "mine"
        assert '"format": 2' in (root / "newer" / "manifest.json").read_text()


async def test_an_older_one_that_cannot_be_removed_does_not_make_the_new_one_fail(
    connect: Callable, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: CheckpointDirectory, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    async with connect() as client:
        root = Path((await save(client, "zero")).path).parent
        await train(client, batch())
        monkeypatch.setattr(CheckpointDirectory, "remove", refused)
        assert (await save(client, "one", keep=1)).version.step == 1
        assert sorted(path.name for path in root.iterdir()) == ["one", "zero"]
        await load(client, "one")


async def test_the_last_ones_of_the_run_are_kept(connect: Callable, batch: Batch) -> None:
    async with connect() as client:
        root = Path((await save(client, "other", run_id="another-run")).path).parent
        for number in range(4):
            await train(client, batch(number))
            await save(client, f"s{number}", keep=2)
        assert sorted(path.name for path in root.iterdir()) == ["other", "s2", "s3"]


async def test_a_full_disk_leaves_nothing_and_training_goes_on(connect: Callable, batch: Batch) -> None:
    async with connect() as client:
        root = Path((await save(client, "zero")).path).parent
        with files_limited_to(4096), pytest.raises(RollwireError, match="checkpoint one cannot be written") as raised:
            await save(client, "one")
        assert (raised.value.code.name, raised.value.reason) == ("RESOURCE_EXHAUSTED", "STORAGE_FAILED")
        assert [path.name for path in root.iterdir()] == ["zero"]
        await train(client, batch())
        await save(client, "one")
        await load(client, "one")


async def test_leftovers_are_removed_at_the_start(connect: Callable, tmp_path: Path) -> None:
    root = tmp_path / "output" / "checkpoints"
    async with connect() as client:
        await save(client, "zero")
    shutil.copytree(root / "zero", root / ".one.partial")
    async with connect() as client:
        assert [path.name for path in root.iterdir()] == ["zero"]
        await load(client, "zero")
