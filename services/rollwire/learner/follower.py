"""What a process does that is a rank of the learner but not the one that serves."""

from __future__ import annotations

import os
from typing import NoReturn

import structlog

from rollwire.learner.distributed import connect, follow
from rollwire.learner.rank_watch import RankFailure, RankWatch, describe
from rollwire.learner.seats import Seat
from rollwire.learner.trainer import load_trainer
from rollwire.serving.accelerator import prepare_for
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)


def run_follower(config: RunConfig, seat: Seat) -> NoReturn:
    """Loads the model and executes the commands of rank 0, which ends this process when it ends itself.

    Raises:
        ServeError: The store of the ranks cannot be reached.
    """
    structlog.contextvars.bind_contextvars(rank=seat.rank)
    watch = RankWatch(seat, lambda failure: _end(seat, failure))
    watch.start()
    try:
        accelerator = prepare_for(config, torch_threads=config.learner.torch_threads)
        ranks = connect(seat, config.learner, accelerator.device, watch)
        follow(load_trainer(config, accelerator, ranks))
    except BaseException as error:
        failure = describe(seat.rank, error)
        watch.report(failure)
        expected = isinstance(error, ServeError) or failure.consequence
        _log.error("rank failed", cause=failure.cause, exc_info=None if expected else error)
        os._exit(1)  # threads of torch.distributed may never end


def _end(seat: Seat, verdict: RankFailure) -> None:
    """Ends this process as rank 0 says, or because rank 0 is gone."""
    if verdict.cause:
        _log.error("the learner ends", rank=seat.rank, cause=verdict.cause)
    os._exit(1 if verdict.cause else 0)
