"""Checkpoints as directories: complete under their name or not there, with a manifest that knows every file.

    <root>/<name>/manifest.json        sizes and SHA-256 of all other files, and its own; written last
    <root>/<name>/state.json           everything that is no tensor
    <root>/<name>/shard-….safetensors  tensors
    <root>/.<name>.partial             being written, or left over by a process that died

No file is a pickle. Knows nothing of torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rollwire.learner.checkpoint_manifest import MANIFEST, FileEntry, Manifest, corrupt, decode, encode
from rollwire.learner.storage import sync, write_durably
from rollwire.rpc.errors import Reason, RollwireError, not_found

STATE: Final = "state.json"
_SUFFIX: Final = ".partial"
_TENSORS: Final = ".safetensors"
_SHOWN_NAMES: Final = 10


class CheckpointDirectory:
    """The checkpoints below one directory. Methods raise `OSError` when the disk refuses.

    Args:
        root: Made when needed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where a complete checkpoint is."""
        return self.root / name

    def partial(self, name: str) -> Path:
        """Where it is being written; no checkpoint can have this name, for names begin with a letter or digit."""
        return self.root / f".{name}{_SUFFIX}"

    def remove_leftovers(self) -> list[str]:
        """Removes what processes left that died while they wrote; returns the names. Nothing while one writes."""
        if not self.root.is_dir():
            return []
        with self._lock(alone=True) as free:
            left = sorted(self.root.glob(f".*{_SUFFIX}")) if free else []
            for path in left:
                shutil.rmtree(path)
        return [path.name for path in left]

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yields an empty directory for a checkpoint; it is gone afterwards unless `publish` gave it its name."""
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.partial(name)
        with self._lock(alone=False):
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def publish(self, manifest: Manifest) -> Manifest:
        """Completes the checkpoint that is being written: manifest, fsync, rename; returns the manifest's digest in it.

        A damaged checkpoint of the same name is replaced.
        """
        partial, target = self.partial(manifest.name), self.path(manifest.name)
        data = encode(manifest)
        write_durably(partial / MANIFEST, data)
        sync(partial)
        if target.exists():
            self.remove(manifest.name, partial.with_name(f".{manifest.name}..old{_SUFFIX}"))
        partial.rename(target)
        sync(self.root)
        return decode(manifest.name, data)

    def remove(self, name: str, aside: Path | None = None) -> None:
        """Removes a checkpoint; a process that dies meanwhile leaves a leftover, never half a checkpoint."""
        aside = aside or self.partial(name)
        shutil.rmtree(aside, ignore_errors=True)
        self.path(name).rename(aside)
        shutil.rmtree(aside)

    def names(self) -> list[str]:
        """Names of everything that may be a complete checkpoint, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def read(self, name: str) -> Manifest:
        """Returns the manifest of a checkpoint.

        Raises:
            RollwireError: NOT_FOUND / `UNKNOWN_CHECKPOINT`, DATA_LOSS / `CHECKPOINT_CORRUPT`.
        """
        if not self.path(name).is_dir():
            known = ", ".join(self.names()[-_SHOWN_NAMES:]) or "none"
            raise not_found(
                Reason.UNKNOWN_CHECKPOINT,
                f"there is no checkpoint {name} in {self.root}; there are: {known}",
                name=name,
            )
        try:
            data = (self.path(name) / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise corrupt(name, MANIFEST, "is missing") from None
        except OSError as error:
            raise corrupt(name, MANIFEST, f"cannot be read ({error.strerror})") from error
        return decode(name, data)

    def check(self, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
        """Compares files with the manifest; several ranks divide them by share.

        Raises:
            RollwireError: DATA_LOSS / `CHECKPOINT_CORRUPT` that names the first file that is missing, short or changed,
                or that has tensors and is not in the manifest.
        """
        directory = self.path(manifest.name)
        if share == 0:
            self._refuse_foreign(manifest)
        for file, entry in sorted(manifest.files.items())[share::shares]:
            try:
                size = (directory / file).stat().st_size
                found = describe_file(directory / file) if size == entry.size else None
            except FileNotFoundError:
                raise corrupt(manifest.name, file, "is missing") from None
            except OSError as error:
                raise corrupt(manifest.name, file, f"cannot be read ({error.strerror})") from error
            if found is None:
                raise corrupt(manifest.name, file, f"has {size} bytes instead of {entry.size}")
            if found != entry:
                raise corrupt(manifest.name, file, "was changed: its SHA-256 is another one")

    def read_state(self, name: str) -> dict[str, Any]:
        """Returns what `write_state` wrote; the file was compared with its digest before.

        Raises:
            RollwireError: DATA_LOSS / `CHECKPOINT_CORRUPT`.
        """
        try:
            found: dict[str, Any] = json.loads((self.path(name) / STATE).read_bytes())
        except OSError as error:
            raise corrupt(name, STATE, f"cannot be read ({error.strerror})") from error
        return found

    def _refuse_foreign(self, manifest: Manifest) -> None:
        """Refuses tensors that the manifest does not know: whoever reads the directory would take them for its own."""
        for path in sorted(self.path(manifest.name).glob(f"*{_TENSORS}")):
            if path.name not in manifest.files:
                raise corrupt(manifest.name, path.name, "is not in its manifest; remove that file")

    def prune(self, run_id: str, keep: int, newest: str) -> list[str]:
        """Removes all complete checkpoints of a run but the `keep` written last, >= 1; returns their names.

        Args:
            run_id: The run.
            keep: How many stay.
            newest: The one written last, which stays whatever the clock said when the others were written.
        """
        found = []
        for name in self.names():
            try:
                manifest = self.read(name)
            except RollwireError:
                continue  # not ours to judge
            if manifest.run_id == run_id:
                found.append((name == newest, manifest.written_ns, name))
        old = [name for _, _, name in sorted(found)[:-keep]]
        for name in old:
            self.remove(name)
        return old

    @contextmanager
    def _lock(self, *, alone: bool) -> Iterator[bool]:
        """Says to other learners that use the directory that this one writes, or asks whether none of them does.

        Yields whether that is so. The kernel ends it with the process.
        """
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
                held = True
            except BlockingIOError:
                held = False
            except OSError:  # a file system without locks: nobody can ask either, so that nothing is ever removed
                held = not alone
            yield held
        finally:
            os.close(descriptor)


def describe_file(path: Path) -> FileEntry:
    """Returns what a manifest says about a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Writes what is no tensor, durably."""
    write_durably(directory / STATE, json.dumps(state, separators=(",", ":"), allow_nan=False).encode())
