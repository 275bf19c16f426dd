"""The thread that decodes: takes commands between passes, computes passes, draws tokens, reports pieces.

Only this thread touches the model, the runner and the scheduler. Commands come in through a queue; pieces go out
through one callback per pass, so that a batch of a hundred sequences wakes the receiver once.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from rollwire.rollout.engine import GenerationError, Piece
from rollwire.rollout.engines.runners import Runner
from rollwire.rollout.engines.sampler import Draw, draw_tokens
from rollwire.rollout.engines.scheduler import Generation, Scheduler
from rollwire.serving.logs import get_logger
from rollwire.v1 import trajectory_pb2, weights_pb2

_log = get_logger(__name__)
_RUNNING: Final = trajectory_pb2.STOP_REASON_UNSPECIFIED

Outcome = Piece | GenerationError
Deliver = Callable[[list[tuple[Generation, Outcome]]], None]


class DecodeLoop:
    """Owns the decoding thread.

    Args:
        runner: Computes passes.
        scheduler: Plans passes.
        wide: Type in which probabilities are summed.
        deliver: Called in the decoding thread with the pieces and errors of one pass.

    Attributes:
        version: Version of the weights; changed in the decoding thread.
        generated_tokens: Tokens drawn so far.
        ended: Done once the thread has ended, however.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, wide: torch.dtype, deliver: Deliver) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._wide = wide
        self._deliver = deliver
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._outbox: list[tuple[Generation, Outcome]] = []
        self.version = weights_pb2.WeightVersion()
        self.generated_tokens = 0
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_to_end, name="decode", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.ended.set_running_or_notify_cancel()  # who waits for it and goes away does not cancel it
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Runs a command in the decoding thread, between two passes, after those posted before."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def close(self) -> None:
        """Ends the thread after the pass in progress; generations get no further pieces."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    # The methods below run in the decoding thread.

    def submit(self, generation: Generation) -> None:
        """Accepts a generation."""
        self._scheduler.submit(generation)

    def abort(self, generation: Generation) -> None:
        """Ends a generation; nobody listens to it any more."""
        self._scheduler.abort(generation)

    def abort_all(self) -> None:
        """Ends all generations and reports what they have not reported yet."""
        for generation in self._scheduler.generations():
            self._scheduler.abort(generation)
            self._report(generation)

    def release(self, cache_key: str) -> None:
        """Frees the prefix kept under a key."""
        self._scheduler.release(cache_key)

    def forget(self) -> None:
        """Forgets everything computed with the present weights.

        Raises:
            RuntimeError: A generation is running: it would be finished by other weights.
        """
        if self._scheduler.has_generations:
            raise RuntimeError("weights may only change while nothing is generated")
        self._scheduler.forget_kept()
        self._runner.forget()

    def free(self) -> None:
        """Forgets as `forget` does, and gives the memory for keys and values back."""
        self.forget()
        self._runner.free()

    def _run_to_end(self) -> None:
        try:
            self._run()
        finally:
            self.ended.set_result(None)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._next_commands():
                try:
                    self._step()
                except Exception as error:  # a bug must not leave callers waiting for ever
                    _log.error("unexpected error while decoding", exc_info=error)
                    for generation in self._scheduler.generations():
                        self._fail(generation, f"unexpected {type(error).__name__} while decoding")
                if self._outbox:
                    outbox, self._outbox = self._outbox, []
                    self._deliver(outbox)

    def _next_commands(self) -> bool:
        """Executes the waiting commands; sleeps while there is nothing to do. False once closed."""
        with self._wake:
            if not self._closed and not self._commands and not self._scheduler.can_run(time.monotonic()):
                self._wake.wait(self._scheduler.wait_s(time.monotonic()))
            if self._closed:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return True

    def _step(self) -> None:
        """Computes one pass and draws the tokens that it makes possible."""
        chunks = self._scheduler.next_pass(time.monotonic())
        if not chunks:
            return
        generations = [chunk.generation for chunk in chunks if chunk.is_last]
        try:
            logits = self._runner.logits(chunks)
            for chunk in chunks:
                self._scheduler.computed(chunk)
            draws = [
                Draw(generation.request.sampling, generation.request.seed, len(generation.token_ids))
                for generation in generations
            ]
            tokens, logprobs = draw_tokens(logits, draws, self._wide) if draws else ([], [])
        except Exception as error:  # out of memory and other faults of the device end these generations, not the server
            _log.error("a forward pass failed", sequences=len(chunks), exc_info=error)
            for chunk in chunks:
                self._fail(chunk.generation, f"the forward pass failed with {type(error).__name__}")
            return
        now_s = time.monotonic()
        for generation, token, logprob in zip(generations, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self._fail(generation, "the model gave logits that are not finite")
                continue
            self._scheduler.drawn(generation, token, logprob, now_s)
            self._report(generation)
        self.generated_tokens += len(tokens)

    def _fail(self, generation: Generation, message: str) -> None:
        self._scheduler.abort(generation)
        self._outbox.append((generation, GenerationError(message)))

    def _report(self, generation: Generation) -> None:
        """Queues the tokens that were not reported yet: those of this pass when streaming, all at the end otherwise."""
        stop_reason = generation.stop_reason
        if stop_reason == _RUNNING and not generation.request.stream:
            return
        begin = generation.reported
        generation.reported = len(generation.token_ids)
        piece = Piece(generation.token_ids[begin:], generation.logprobs[begin:], self.version, stop_reason)
        self._outbox.append((generation, piece))
