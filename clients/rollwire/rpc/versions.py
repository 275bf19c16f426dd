"""Weight versions as text, and the version of this build."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rollwire.v1 import weights_pb2


def version_text(weights: weights_pb2.WeightVersion) -> str:
    """Returns `lineage@step`, or `none` for an unset version."""
    return f"{weights.lineage}@{weights.step}" if weights.lineage else "none"


def build_version() -> str:
    """Returns the version of the installed distribution, `unknown` when it runs from a bare source tree."""
    try:
        return version("rollwire")
    except PackageNotFoundError:
        return "unknown"
