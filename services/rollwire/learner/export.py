"""Writes a published version as a Hugging Face directory: completely or not at all.

The weights are the published ones, hence in the serving dtype (`model.dtype`): what is exported is bit for bit what the
rollout servers played with.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import GenerationConfig

from rollwire.learner.storage import is_refusal, storage_failed, sync
from rollwire.rpc.errors import Reason, precondition
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import HostTensor
from rollwire.serving.logs import get_logger
from rollwire.serving.model_tensors import TORCH_TYPES
from rollwire.v1 import learner_pb2, weights_pb2

_log = get_logger(__name__)
_RECORD: Final = "rollwire.json"
"""File in an export that says which version it holds."""


class Exporter:
    """Exports below one directory.

    Args:
        root: Directory that exports are created in.
        model: Gives architecture, configuration and generation configuration.
        tokenizer: Written beside the weights, with its chat template; None when the model has none.
        serving_dtype: Element type of the published floating-point weights.
    """

    def __init__(self, root: Path, model: Any, tokenizer: Any | None, serving_dtype: torch.dtype) -> None:
        self._root = root
        self._model = model
        self._tokenizer = tokenizer
        self._dtype = serving_dtype

    def export(self, publisher: WeightPublisher, name: str) -> learner_pb2.ExportResponse:
        """Writes the present version to `root/name`; does nothing when it is there already.

        Writing takes host memory for one copy of the version.

        Raises:
            RollwireError: FAILED_PRECONDITION / `ALREADY_EXISTS` when the name holds something else; NOT_FOUND /
                `UNKNOWN_VERSION` when publishing failed and there is no version; RESOURCE_EXHAUSTED / `STORAGE_FAILED`.
        """
        tensors = publisher.tensors()  # refuses, where there is no version
        manifest = publisher.manifest
        assert manifest is not None
        target = (self._root / name).resolve()
        if not target.exists():
            # No export can have this name, since names begin with a letter or digit.
            partial = target.with_name(f".{name}.partial")
            try:
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)
                self._write(manifest, tensors, partial)
                partial.rename(target)
                sync(target.parent)
            except Exception as error:
                shutil.rmtree(partial, ignore_errors=True)
                if is_refusal(error):
                    raise storage_failed("export", name, error) from error
                raise
            _log.info("exported", path=str(target), version=version_text(manifest.version))
        elif _recorded(target) != _record(manifest):
            raise precondition(
                Reason.ALREADY_EXISTS,
                f"the export {name} exists and holds another version than {version_text(manifest.version)}; "
                "choose another name",
                name=name,
                version=version_text(manifest.version),
            )
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        return learner_pb2.ExportResponse(path=str(target), version=manifest.version, bytes=size)

    def _write(
        self, manifest: weights_pb2.WeightManifest, tensors: Iterator[tuple[str, HostTensor]], directory: Path
    ) -> None:
        self._save_model(directory, {name: _as_torch(tensor) for name, tensor in tensors})
        # save_pretrained notes the element type of the masters; readers that follow the configuration need the files'.
        config = copy.deepcopy(self._model.config)
        config.dtype = self._dtype
        config.save_pretrained(directory)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(directory)
        record = directory / _RECORD
        record.write_text(json.dumps(_record(manifest), indent=1) + "\n")
        for file in directory.iterdir():  # safetensors makes files that only the owner may read
            file.chmod(record.stat().st_mode)
            sync(file)
        sync(directory)

    def _save_model(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Writes weights and generation configuration, the latter as it came.

        Many published models have settings there that transformers loads with a warning and refuses to save.
        """
        came = self._model.generation_config
        self._model.generation_config = None if came is None else GenerationConfig()
        try:
            self._model.save_pretrained(directory, state_dict=tensors)
        finally:
            self._model.generation_config = came
        if came is not None:
            came.to_json_file(directory / "generation_config.json")


def _as_torch(tensor: HostTensor) -> torch.Tensor:
    writable = bytearray(tensor.data)  # torch warns about memory that it could not write to
    return torch.frombuffer(writable, dtype=TORCH_TYPES[tensor.dtype]).reshape(tensor.shape)


def _record(manifest: weights_pb2.WeightManifest) -> dict[str, str]:
    return {"version": version_text(manifest.version), "digest": manifest.digest.hex()}


def _recorded(directory: Path) -> dict[str, str] | None:
    """Returns what an export says about itself; None for a directory that is no export."""
    try:
        found = json.loads((directory / _RECORD).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
