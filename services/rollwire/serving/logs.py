"""Structured logs: coloured lines on a terminal, JSON lines otherwise, with run, step and service bound."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog
import structlog.tracebacks


class _Lenient:
    """A stream that loses lines where the disk is full: what is logged about must go on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def configure_logging(service: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Configures logging of this process; called once, before anything is logged.

    Args:
        service: Name bound to every line, such as `rollout`.
        level: Least level written: DEBUG, INFO, WARNING or ERROR.
        stream: Where lines go; default standard error.
    """
    stream = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level]
    lenient = cast(TextIO, _Lenient(stream))
    renderer: list[structlog.typing.Processor]
    if stream.isatty():
        plain = structlog.dev.plain_traceback
        renderer = [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=plain)]
    else:
        renderer = [
            # Without local variables: they may hold what a caller sent.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(ensure_ascii=True),  # escapes control characters of foreign text
        ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(lenient),
        cache_logger_on_first_use=False,
    )
    # Libraries that log through the standard module: warnings and worse, on the same stream.
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=lenient, format="%(name)s: %(message)s")
    structlog.contextvars.bind_contextvars(service=service)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger that binds its module name."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger
