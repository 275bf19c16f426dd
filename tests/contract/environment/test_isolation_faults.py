"""Environments in processes that crash, hang, flood and multiply: their episode fails and nobody else's."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.isolation import processes
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]
Leftovers = Callable[[], Any]
ERROR = pb.ENVIRONMENT_FAILURE_KIND_ERROR
TIMEOUT = pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
LOST = pb.ENVIRONMENT_FAILURE_KIND_LOST
INVALID = pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT
STEP_TIMEOUT_S = 3.0

FAULTS = [
    ("raise", ERROR, "ZeroDivisionError", "cannot divide <path> by zero"),
    ("exit", ERROR, "SystemExit", "3"),
    ("recursion", ERROR, "RecursionError", "maximum recursion depth exceeded"),
    ("hog", ERROR, "MemoryError", ""),
    ("kill", LOST, "Lost", "its process was killed by SIGKILL"),
    ("segfault", LOST, "Lost", "its process was killed by SIGSEGV"),
    ("abort", LOST, "Lost", "its process was killed by SIGABRT"),
    ("os exit", LOST, "Lost", "its process ended with status 7"),
    ("flood and die", LOST, "Lost", "its process ended with status 1"),
    ("offspring and die", LOST, "Lost", "its process ended with status 0"),
    ("pollute", LOST, "Lost", "its process wrote into the server's connection: a frame of kind"),
    ("close all", LOST, "Lost", "its process ended with status"),
    ("sleep", TIMEOUT, "Timeout", "no answer within 3 s"),
    ("busy", TIMEOUT, "Timeout", "no answer within 3 s"),
    ("stopped", TIMEOUT, "Timeout", "no answer within 3 s"),
    ("deaf", TIMEOUT, "Timeout", "no answer within 3 s"),
    ("bomb", TIMEOUT, "Timeout", "no answer within 3 s"),
    ("long", INVALID, "InvalidResult", "the observation has 52428800 bytes; allowed: at most 1048576"),
    ("huge picture", INVALID, "InvalidResult", "the picture has 52428808 bytes as PNG; allowed: at most 1048576"),
    ("nan", INVALID, "InvalidResult", "the reward is nan; allowed: a finite number"),
    ("none", INVALID, "InvalidResult", "step returned a value of type NoneType"),
    ("classes", INVALID, "InvalidResult", "step returned an info of type type; allowed: a dict"),
    ("lambda", INVALID, "InvalidResult", "the observation is of type function; allowed: str"),
    ("endless", INVALID, "InvalidResult", "the reward is"),
    ("cyclic", INVALID, "InvalidResult", "the observation is of type dict; allowed: str"),
]


def definitions(**changes: Any) -> dict[str, Any]:
    # The limit of time is tight only where a test waits for it: a busy machine takes its time for the rest.
    common = {"type": "faulty:Faulty", "memory_mib": 1024, "step_timeout_s": 60, **changes}
    return {"Faulty": common, "Other": {"type": "faulty:Faulty"}}


async def play(client: EnvironmentClient, opened: pb.OpenSessionResponse, turn: int, action: str = "a") -> str:
    reply = await client.step(opened.session_id, turn, action)
    assert not reply.HasField("failure"), reply
    return reply.observation


@pytest.mark.parametrize(("action", "kind", "type_name", "message"), FAULTS, ids=[fault[0] for fault in FAULTS])
async def test_a_fault_ends_its_own_episode_alone(
    serve: Any, opening: Opening, gone: Leftovers, action: str, kind: int, type_name: str, message: str
) -> None:
    timeout_s = STEP_TIMEOUT_S if kind == TIMEOUT else 60
    async with serve(definitions=definitions(step_timeout_s=timeout_s)) as client:
        bystanders = [await client.open_session(opening(tag)) for tag in ("Faulty", "Other", "FrozenLake")]
        victim = await client.open_session(opening("Faulty"))
        memory_before = peak_memory_bytes()
        fault = asyncio.create_task(client.step(victim.session_id, 0, action))
        for opened in bystanders:
            await play(client, opened, 0)
        reply = await fault
        assert (reply.failure.kind, reply.failure.type) == (kind, type_name)
        assert reply.failure.message.startswith(message)
        assert reply == pb.StepResponse(failure=reply.failure)  # nothing that could be trained
        assert await client.step(victim.session_id, 0, action) == reply
        assert peak_memory_bytes() - memory_before < 32 << 20
        with pytest.raises(RollwireError) as caught:
            await client.step(victim.session_id, 1, "a")
        assert caught.value.reason == Reason.EPISODE_ENDED
        for opened in bystanders:
            await play(client, opened, 1)
        await client.close_session(victim.session_id)
        later = await client.open_session(opening("Faulty"))
        assert await play(client, later, 0) not in ("", victim.observation)
    await gone()


@pytest.mark.parametrize(
    ("how", "kind"), [("raise", ERROR), ("segfault", LOST), ("os exit", LOST), ("busy", TIMEOUT), ("hog", ERROR)]
)
async def test_a_fault_while_starting_leaves_no_session(
    serve: Any, opening: Opening, gone: Leftovers, how: str, kind: int
) -> None:
    timeout_s = STEP_TIMEOUT_S if kind == TIMEOUT else 60
    async with serve(definitions=definitions(step_timeout_s=timeout_s)) as client:
        answer = await client.open_session(opening("Faulty", start_with=how))
        assert answer == pb.OpenSessionResponse(failure=answer.failure)
        assert answer.failure.kind == kind
        assert (await client.list_environments()).open_sessions == 0
        await play(client, await client.open_session(opening("Faulty")), 0)
    await gone()


@pytest.mark.parametrize("action", ["offspring", "flood", "fork and return"])
async def test_what_is_no_fault_goes_on(serve: Any, opening: Opening, gone: Leftovers, action: str) -> None:
    async with serve(definitions=definitions()) as client:
        opened = await client.open_session(opening("Faulty"))
        memory_before = peak_memory_bytes()
        assert await play(client, opened, 0, action) == opened.observation
        assert await play(client, opened, 1) == opened.observation
        assert peak_memory_bytes() - memory_before < 32 << 20
    await gone()


async def test_processes_left_behind_end_with_their_worker(
    serve: Any, opening: Opening, alive: Callable[[], set[int]], gone: Leftovers
) -> None:
    async with serve(definitions=definitions(recycle_after_sessions=1)) as client:
        before = alive()
        opened = await client.open_session(opening("Faulty"))
        await play(client, opened, 0, "offspring")
        assert len(alive() - before) >= 5
        await client.close_session(opened.session_id)
        async with asyncio.timeout(60):
            while alive() - before:
                await asyncio.sleep(0.02)
    await gone()


@pytest.mark.parametrize("note", ["sleep", "os exit", "raise"])
async def test_faults_while_drawing_and_closing(serve: Any, opening: Opening, gone: Leftovers, note: str) -> None:
    async with serve(definitions=definitions(step_timeout_s=STEP_TIMEOUT_S)) as client:
        opened = await client.open_session(opening("Faulty", note=note))
        with pytest.raises(RollwireError) as caught:
            await client.render(opened.session_id, pb.RENDER_FORMAT_TEXT)
        assert caught.value.reason == Reason.RENDER_UNSUPPORTED
        reply = await client.step(opened.session_id, 0, "a")
        assert reply.failure.kind == {"sleep": LOST, "os exit": LOST, "raise": 0}[note]
        other = await client.open_session(opening("Faulty", note=note))
        await client.close_session(other.session_id)
        await play(client, await client.open_session(opening("Faulty")), 0)
    await gone()


async def test_five_crashes_in_a_row_disable_the_tag_and_no_other(
    serve: Any, opening: Opening, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(definitions=definitions()) as client:
        survivor = await client.open_session(opening("Faulty"))
        for _ in range(5):
            opened = await client.open_session(opening("Faulty"))
            await client.step(opened.session_id, 0, "os exit")
        with pytest.raises(RollwireError) as caught:
            await client.open_session(opening("Faulty"))
        assert caught.value.reason == Reason.ENVIRONMENT_DISABLED
        assert "with Lost: its process ended with status 7; it stays so until" in caught.value.message
        assert "environment disabled until the server restarts" in "".join(capsys.readouterr())
        await play(client, survivor, 0)
        await play(client, await client.open_session(opening("Other")), 0)


async def test_sessions_that_share_a_process_share_its_fate_and_count_once(serve: Any, opening: Opening) -> None:
    async with serve(
        definitions=definitions(sessions_per_process=8, step_timeout_s=STEP_TIMEOUT_S), disable_after_failures=2
    ) as client:
        together = [await client.open_session(opening("Faulty")) for _ in range(8)]
        assert len({opened.observation for opened in together}) == 1
        # Whichever arrives first hangs; the others wait for it.
        replies = await asyncio.gather(*(client.step(opened.session_id, 0, "sleep") for opened in together[:3]))
        assert sorted(reply.failure.kind for reply in replies) == [TIMEOUT, LOST, LOST]
        replies.append(await client.step(together[7].session_id, 0, "a"))
        for reply in replies:
            if reply.failure.kind != TIMEOUT:
                assert reply.failure.message.startswith("another session of the same process failed, and the process")
        await play(client, await client.open_session(opening("Faulty")), 0)


async def test_the_log_holds_stack_traces_and_last_lines(
    serve: Any, opening: Opening, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = ""
    async with serve(definitions=definitions()) as client:
        for action in ("raise", "flood and die"):
            opened = await client.open_session(opening("Faulty"))
            reply = await client.step(opened.session_id, 0, action)
            assert "secret" not in str(reply)
        opened = await client.open_session(opening("Faulty"))
        await play(client, opened, 0, "flood")
        assert (await client.step(opened.session_id, 1, "raise")).HasField("failure")
        await client.close_session(opened.session_id)
        async with asyncio.timeout(60):
            while logged.count("the last line") < 2:  # of the process that died, and of the episode that failed
                await asyncio.sleep(0.02)
                logged += "".join(capsys.readouterr())
    logged += "".join(capsys.readouterr())
    assert "secret.txt" in logged and "do_raise" in logged
    assert "its last words" in logged and "the last line" in logged
    assert len(logged) < 100_000


def peak_memory_bytes() -> int:
    """Returns the most memory that this process, which is the server, ever had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


async def test_a_server_without_free_descriptors_fails_the_session_and_frees_the_seat(
    serve: Any, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async with serve(definitions=definitions(max_processes=1)) as client:
        with monkeypatch.context() as patched:
            patched.setattr(processes.socket, "socketpair", none_left)
            failed = await client.open_session(opening("Faulty"))
        assert failed.failure.kind == pb.ENVIRONMENT_FAILURE_KIND_LOST
        assert failed.failure.message == "its process could not be started: Too many open files"
        assert (await client.open_session(opening("Faulty"))).session_id


async def test_a_pattern_that_backtracks_ends_its_own_episode_alone(serve: Any, opening: Opening) -> None:
    pattern = r"<answer>(.*?)</answer>\s*$"  # innocent, and quadratic for what follows
    lake = {"type": "FrozenLake", "options": {"action_pattern": pattern}, "step_timeout_s": STEP_TIMEOUT_S}
    async with serve(definitions={"Lake": lake}) as client:
        hanging = await client.open_session(opening("Lake"))
        turn = asyncio.create_task(client.step(hanging.session_id, 0, "<answer>" * 131_000))
        other = await client.open_session(opening("FrozenLake"))
        assert not (await client.step(other.session_id, 0, "<answer>Left</answer>")).HasField("failure")
        assert (await turn).failure.kind == TIMEOUT
        again = await client.open_session(opening("Lake"))
        assert (await client.step(again.session_id, 0, "<answer>Left</answer>\n")).metrics["action_is_valid"] == 1.0
