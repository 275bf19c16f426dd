"""Commands from rank 0 to the other ranks as bytes: a JSON skeleton, then the bytes of all arrays. Never pickle.

Carried are None, booleans, numbers, texts, bytes, lists, tuples, dictionaries with text keys, NumPy arrays, protobuf
messages, and the dataclasses and enumerations of Rollwire itself, which are named by module and class.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

_KIND: Final = "$"
_PACKAGE: Final = "rollwire."
_LENGTH_BYTES: Final = 8


def encode(value: object) -> bytes:
    """Returns a value as bytes.

    Raises:
        TypeError: It holds something that cannot be carried.
    """
    return _Encoder().encode(value)


def decode(data: bytes) -> Any:
    """Returns the value that `encode` was given; arrays are copies that may be written to."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return _Decoder(memoryview(data)[end:]).restore(json.loads(data[_LENGTH_BYTES:end]))


class _Encoder:
    def __init__(self) -> None:
        self._blobs: list[bytes] = []
        self._size = 0

    def encode(self, value: object) -> bytes:
        skeleton = json.dumps(self._flat(value), separators=(",", ":")).encode()
        return b"".join([len(skeleton).to_bytes(_LENGTH_BYTES, "little"), skeleton, *self._blobs])

    def _flat(self, value: object) -> Any:
        """Returns the JSON form of a value."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list):
            return [self._flat(item) for item in value]
        if isinstance(value, tuple):
            return {_KIND: "tuple", "items": [self._flat(item) for item in value]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {_KIND: "dict", "items": {key: self._flat(item) for key, item in value.items()}}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return {
                _KIND: "array",
                "dtype": value.dtype.str,
                "shape": list(value.shape),
                "at": self._blob(np.ascontiguousarray(value).tobytes()),
            }
        if isinstance(value, bytes):
            return {_KIND: "bytes", "at": self._blob(value)}
        return self._flat_named(value)

    def _flat_named(self, value: object) -> Any:
        """Returns the JSON form of what is named by its class."""
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if isinstance(value, Message):
            return {_KIND: "message", "class": name, "at": self._blob(value.SerializeToString(deterministic=True))}
        if kind.__module__.startswith(_PACKAGE) and isinstance(value, Enum):
            return {_KIND: "enum", "class": name, "name": value.name}
        if kind.__module__.startswith(_PACKAGE) and dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            fields = {field: self._flat(getattr(value, field)) for field in names}
            return {_KIND: "dataclass", "class": name, "fields": fields}
        if isinstance(value, np.generic):
            return self._flat(value.item())
        raise TypeError(f"a command cannot carry a {kind.__module__}.{kind.__qualname__}")

    def _blob(self, data: bytes) -> list[int]:
        """Appends bytes and returns where they are: begin and end."""
        self._blobs.append(data)
        self._size += len(data)
        return [self._size - len(data), self._size]


class _Decoder:
    def __init__(self, blobs: memoryview) -> None:
        self._blobs = blobs
        self._kinds: Mapping[str, Callable[[dict[str, Any]], Any]] = {
            "tuple": lambda part: tuple(self.restore(item) for item in part["items"]),
            "dict": lambda part: {key: self.restore(item) for key, item in part["items"].items()},
            "bytes": lambda part: bytes(self._at(part)),
            "array": self._array,
            "message": lambda part: _find(part, Message).FromString(bytes(self._at(part))),
            "enum": lambda part: _find(part, Enum)[part["name"]],
            "dataclass": self._dataclass,
        }

    def restore(self, part: Any) -> Any:
        """Returns the value of a piece of the skeleton."""
        if isinstance(part, list):
            return [self.restore(item) for item in part]
        return self._kinds[part[_KIND]](part) if isinstance(part, dict) else part

    def _at(self, part: dict[str, Any]) -> memoryview:
        begin, end = part["at"]
        return self._blobs[begin:end]

    def _array(self, part: dict[str, Any]) -> NDArray[Any]:
        return np.frombuffer(bytearray(self._at(part)), dtype=np.dtype(part["dtype"])).reshape(part["shape"])

    def _dataclass(self, part: dict[str, Any]) -> Any:
        return _find(part, object)(**{key: self.restore(item) for key, item in part["fields"].items()})


def _find(part: dict[str, Any], base: type) -> Any:
    """Returns the class that a skeleton names; only Rollwire's own and protobuf's are looked for."""
    module, _, name = part["class"].partition(":")
    if not module.startswith((_PACKAGE, "google.protobuf.")):
        raise TypeError(f"a command names the class {part['class']!r}, which is not Rollwire's")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"a command names {part['class']!r}, which is no {base.__name__}")
    return found
