"""Where the numbers of a run go: a TensorBoard event file and `metrics.jsonl` in the run directory.

Event files are written with the `tensorboard` package alone; neither torch nor TensorFlow is loaded. All scalars of a
step are one event. Both files are flushed after every step, so that a run that dies keeps its curve.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.logged import Logged
from rollwire.coordinator.metrics import finite_metrics

METRICS_FILE: Final = "metrics.jsonl"


class Tracker:
    """Writes scalars and texts. The event file appears with the first value, so that a failed start leaves none.

    Args:
        event_dir: Directory of the event file; made when needed.
        run_dir: Directory of `metrics.jsonl`; exists.
    """

    def __init__(self, event_dir: Path, run_dir: Path) -> None:
        self.event_dir = event_dir
        self._jsonl_path = run_dir / METRICS_FILE
        self._jsonl: IO[str] | None = None
        self._events: Any = None
        self._purged_from: int | None = None

    def go_on(self, logged: Logged) -> None:
        """Continues what an earlier incarnation logged, in a new event file: from its next step on nothing is there.

        What it had logged beyond that, validations, is written again.
        """
        self._purged_from = logged.steps
        for step, metrics in logged.later:
            self._write(_scalars(step, metrics), None)

    def log_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes values at `step`; values that are not finite are left out. Raises `RunError`."""
        values = finite_metrics(metrics)
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values}, allow_nan=False)
        self._write(_scalars(step, values), line)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text at `step`, shown by TensorBoard's text tab. Raises `RunError`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        value = Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])), None)

    def close(self) -> None:
        """Closes both files."""
        for file in (self._events, self._jsonl):
            if file is not None:
                with suppress(OSError):  # the write that failed has been told of; the rest is on disk
                    file.close()

    def _write(self, event: Any, line: str | None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            if self._events is None:
                self.event_dir.mkdir(parents=True, exist_ok=True)
                self._events = EventFileWriter(str(self.event_dir))
                if self._purged_from is not None:
                    self._events.add_event(_restart(self._purged_from))
                self._jsonl = self._jsonl_path.open("a", encoding="utf-8")
            self._events.add_event(event)
            self._events.flush()
            if line is not None and self._jsonl is not None:
                self._jsonl.write(line + "\n")
                self._jsonl.flush()
        except OSError as error:
            raise RunError(f"metrics cannot be written to {self.event_dir} or {self._jsonl_path}: {error}") from error


def _scalars(step: int, values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return Event(wall_time=time.time(), step=step, summary=summary)


def _restart(step: int) -> Any:
    """Returns the event on which readers drop what earlier files have at a step and after it."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
