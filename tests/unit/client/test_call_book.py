"""Which calls a stream sends, in which messages, and what becomes of them when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from rollwire.client.call_book import MAX_SENDS, SMALL_MESSAGE_CALLS, CallBook, PendingCall
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MAX_UNANSWERED_CALLS
from rollwire.v1 import environment_pb2 as pb


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def book() -> CallBook:
    return CallBook()


def add(
    book: CallBook, loop: asyncio.AbstractEventLoop, turn: int, text: str = "", end_s: float = 100.0
) -> PendingCall:
    return book.add("step", pb.StepRequest(session_id="s", turn=turn, action=text), end_s, loop.create_future())


def turns(message: pb.PlayRequest | None) -> list[int]:
    return [] if message is None else [call.step.turn for call in message.calls]


def drained(book: CallBook) -> list[list[int]]:
    messages = []
    while (message := book.next_message(0.0)) is not None:
        assert message.ByteSize() <= ENVIRONMENT_MESSAGE_BYTES
        messages.append(turns(message))
    return messages


def test_all_that_waits_goes_into_few_messages(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    for turn in range(2 * SMALL_MESSAGE_CALLS + 5):
        add(book, loop, turn)
    assert [len(turns(book.next_message(0.0))) for _ in range(3)] == [SMALL_MESSAGE_CALLS, SMALL_MESSAGE_CALLS, 5]
    assert book.next_message(0.0) is None and book.waiting


@pytest.mark.parametrize(
    ("now_s", "end_s", "seconds", "nanos"),
    [(0, 1.5, 1, 500_000_000), (0, 10_000, 3600, 0), (7, 7.25, 0, 250_000_000), (0, 1e-12, 0, 1)],
)
def test_the_timeout_is_what_is_left(
    book: CallBook, loop: asyncio.AbstractEventLoop, now_s: float, end_s: float, seconds: int, nanos: int
) -> None:
    add(book, loop, 0, end_s=end_s)
    message = book.next_message(now_s)
    assert message is not None
    assert (message.calls[0].timeout.seconds, message.calls[0].timeout.nanos) == (seconds, nanos)


def test_calls_that_nobody_waits_for_are_not_sent(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    add(book, loop, 0, end_s=1.0)
    add(book, loop, 1).answer.cancel()
    add(book, loop, 2)
    assert turns(book.next_message(1.0)) == [2]


def test_messages_stay_below_their_limit(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    for turn in range(9):
        add(book, loop, turn, "x" * (1 << 20))
    assert drained(book) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_call_that_fits_into_no_message(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(RollwireError) as caught:
        add(book, loop, 0, "x" * ENVIRONMENT_MESSAGE_BYTES)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not book.waiting


def test_no_more_calls_are_open_than_the_server_takes(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    calls = [add(book, loop, turn) for turn in range(MAX_UNANSWERED_CALLS + 2)]
    sent = drained(book)
    assert [turn for message in sent for turn in message] == list(range(MAX_UNANSWERED_CALLS))
    assert len(sent[0]) == MAX_UNANSWERED_CALLS // 8
    assert book.next_message(0.0) is None
    calls[0].answer.cancel()
    assert book.next_message(0.0) is None, "the server still owes the answer"
    assert book.answered(calls[0].call_id) is calls[0]
    assert book.answered(calls[0].call_id) is None
    assert turns(book.next_message(0.0)) == [MAX_UNANSWERED_CALLS]


def test_a_lost_stream_puts_its_calls_in_front(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    first = [add(book, loop, turn) for turn in range(4)]
    book.next_message(0.0)
    add(book, loop, 4)
    book.answered(first[1].call_id)
    first[2].answer.cancel()
    assert book.repeat() == []
    assert turns(book.next_message(0.0)) == [0, 3, 4]


def test_a_call_is_sent_a_limited_number_of_times(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    call = add(book, loop, 0)
    for _ in range(MAX_SENDS - 1):
        assert turns(book.next_message(0.0)) == [0]
        assert book.repeat() == []
    assert turns(book.next_message(0.0)) == [0]
    assert book.repeat() == [call]
    assert book.next_message(0.0) is None


def test_taking_calls_out(book: CallBook, loop: asyncio.AbstractEventLoop) -> None:
    sent, unsent = add(book, loop, 0), None
    book.next_message(0.0)
    unsent = add(book, loop, 1)
    assert book.take_sent() == [sent]
    assert book.take_all() == [unsent]
    assert not book.waiting and book.next_message(0.0) is None
