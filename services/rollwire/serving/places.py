"""Whether directories that something will be written to can be, found out before hours of work depend on it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollwire.serving.server import ServeError


def require_writable(setting: str, directory: Path) -> None:
    """Tries to make a directory below one that may not exist yet; leaves nothing behind.

    Trying is the only sure way: permission bits say nothing about read-only file systems, quotas, or root.

    Args:
        setting: What names the directory, such as `run.output_dir`.
        directory: The directory.

    Raises:
        ServeError: It cannot be written.
    """
    place = directory.absolute()
    try:
        while not place.exists():
            place = place.parent
        Path(tempfile.mkdtemp(prefix=".rollwire-", dir=place)).rmdir()
    except OSError as error:
        raise ServeError(
            f"{setting} is {str(directory)!r}, but {place} cannot be written ({error.strerror or error}); choose a "
            "directory that you may write to"
        ) from error
