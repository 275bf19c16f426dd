"""Groups of episodes: requested = completed + failed, faults as data, versions per turn, nothing left behind."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.rollout.policy import Hold
from rollwire.rollout.seeds import derive_seed
from rollwire.rpc.errors import Reason, RollwireError, exhausted, not_found
from rollwire.v1 import environment_pb2, rollout_pb2, trajectory_pb2, weights_pb2

Result = rollout_pb2.RunGroupResponse


def trajectories(results: list[Result]) -> list[trajectory_pb2.Trajectory]:
    found = [result.trajectory for result in results if result.HasField("trajectory")]
    return sorted(found, key=lambda trajectory: trajectory.episode_index)


def failures(results: list[Result]) -> list[trajectory_pb2.EpisodeFailure]:
    return [result.failure for result in results if result.HasField("failure")]


def check_trajectory(trajectory: trajectory_pb2.Trajectory) -> None:
    """What the contract says of every trajectory."""
    assert trajectory.sequences and trajectory.turns
    for sequence in trajectory.sequences:
        length = len(sequence.token_ids)
        assert length == len(sequence.loss_mask) == len(sequence.logprobs) >= 1
        covered = [place for span in sequence.version_spans for place in range(span.range.begin, span.range.end)]
        assert covered == [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
        assert all(span.version.lineage for span in sequence.version_spans)
        for sampled, logprob in zip(sequence.loss_mask, sequence.logprobs, strict=True):
            assert math.isfinite(logprob) and logprob <= 0 and (sampled or logprob == 0)
    place = [0] * len(trajectory.sequences)
    for index, turn in enumerate(trajectory.turns):
        assert turn.index == index
        # Turns lie in their sequence one after the other, without gaps.
        assert turn.prompt.begin == place[turn.sequence] and turn.prompt.end == turn.response.begin < turn.response.end
        place[turn.sequence] = turn.response.end
    assert place == [len(sequence.token_ids) for sequence in trajectory.sequences]
    assert trajectory.score == pytest.approx(sum(turn.reward for turn in trajectory.turns))


async def test_a_group_is_played_to_its_end(serve: Any) -> None:
    async with serve() as bench:
        results = await bench.play(attempt=4)
        played = trajectories(results)
        assert [trajectory.episode_index for trajectory in played] == [0, 1, 2]
        info = await bench.client.get_info()
        for trajectory in played:
            check_trajectory(trajectory)
            assert trajectory.trajectory_id == f"g1-e{trajectory.episode_index}-a4" and trajectory.attempt == 4
            assert (trajectory.group_id, trajectory.environment_tag, trajectory.environment_seed) == ("g1", "Lake", 11)
            assert trajectory.sampling_seed == derive_seed(5, trajectory.episode_index)
            assert len(trajectory.turns) == 3 and len(trajectory.sequences) == 1
            assert trajectory.end == trajectory_pb2.EPISODE_END_TERMINATED and trajectory.turns[-1].terminated
            assert trajectory.score == 1.5
            assert dict(trajectory.metrics) == {"steps": 3.0, "turn": 1.0}
            assert trajectory.tokenizer_hash == info.tokenizer_hash and len(trajectory.tokenizer_hash) == 64
            assert trajectory.template_hash == info.template_hash and len(trajectory.template_hash) == 64
            assert trajectory.sampling.temperature == 1 and trajectory.sampling.stop_token_ids
            assert trajectory.sampling.logprob_mode == trajectory_pb2.LOGPROB_MODE_SAMPLED
            spent = trajectory.environment_duration.ToNanoseconds() + trajectory.generation_duration.ToNanoseconds()
            assert 0 < spent <= trajectory.duration.ToNanoseconds()
        assert info.running_episodes == 0
        await bench.server._opener.finish()
        assert not bench.environments.sessions and len(bench.environments.closed) == 3
        assert {request.seed for request in bench.environments.opened} == {11}


async def test_log_probabilities_match_those_of_generate(serve: Any) -> None:
    async with serve() as bench:
        (trajectory, *_) = trajectories(await bench.play())
        tokens = list(trajectory.sequences[0].token_ids)
        for turn in trajectory.turns:
            request = rollout_pb2.GenerateRequest(
                token_ids=tokens[: turn.response.begin],
                sampling=trajectory_pb2.SamplingSettings(max_tokens=6),
                seed=derive_seed(trajectory.sampling_seed, turn.index),
            )
            pieces = [piece async for piece in bench.client.generate(request, timeout_s=10)]
            again = [token for piece in pieces for token in piece.token_ids]
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
            assert again == tokens[turn.response.begin : turn.response.end]
            recorded = trajectory.sequences[0].logprobs[turn.response.begin : turn.response.end]
            assert logprobs == pytest.approx(list(recorded), abs=1e-4)


async def test_the_same_request_gives_the_same_episodes(serve: Any) -> None:
    async with serve() as bench:
        first, again = trajectories(await bench.play()), trajectories(await bench.play())
        other = trajectories(await bench.play(sampling_seed=6))
    tokens = [[list(t.sequences[0].token_ids) for t in played] for played in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert [t.trajectory_id for t in first] == [t.trajectory_id for t in again]
    assert tokens[0][0] != tokens[0][1]


async def test_deterministic_runs_are_equal_bit_for_bit(serve: Any) -> None:
    runs = []
    for slots, jitter_s in ((8, 0.0), (2, 0.01)):
        async with serve(run={"deterministic": True}, rollout={"max_concurrent_sequences": slots}) as bench:
            bench.environments.script.step_s = jitter_s
            groups = await asyncio.gather(*(bench.play(group_id=f"g{n}", sampling_seed=n) for n in range(3)))
            for played in groups:
                for trajectory in trajectories(played):
                    for duration in ("duration", "environment_duration", "generation_duration"):
                        trajectory.ClearField(duration)
            runs.append([[t.SerializeToString(deterministic=True) for t in trajectories(played)] for played in groups])
    assert runs[0] == runs[1]


async def test_a_subset_of_episodes_fills_a_group(serve: Any) -> None:
    async with serve() as bench:
        whole = trajectories(await bench.play())
        (part,) = trajectories(await bench.play(episode_indices=[1], attempt=1))
        assert part.episode_index == 1 and part.trajectory_id == "g1-e1-a1"
        assert part.sequences[0].token_ids == whole[1].sequences[0].token_ids


KINDS = [
    (environment_pb2.ENVIRONMENT_FAILURE_KIND_ERROR, trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR),
    (environment_pb2.ENVIRONMENT_FAILURE_KIND_TIMEOUT, trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT),
    (environment_pb2.ENVIRONMENT_FAILURE_KIND_LOST, trajectory_pb2.FAILURE_REASON_ENVIRONMENT_LOST),
    (environment_pb2.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT, trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR),
]


@pytest.mark.parametrize(("kind", "reason"), KINDS)
async def test_a_failed_environment_is_a_failure_and_never_a_reward(serve: Any, kind: int, reason: int) -> None:
    async with serve() as bench:
        bench.environments.script.kind = kind
        bench.environments.script.fail_at = 1
        results = await bench.play()
        assert len(results) == len(failures(results)) == 3
        for failure in failures(results):
            assert failure.reason == reason and failure.turn == 1 and failure.message == "Boom: it broke"
            assert (failure.group_id, failure.environment_tag, failure.environment_seed) == ("g1", "Lake", 11)
        bench.environments.script.fail_at = -1
        bench.environments.script.fail_open = 1
        (failure, *_) = failures(await bench.play())
        assert failure.reason == reason and failure.turn == 0 and failure.message == "Boom: cannot start"
        await bench.server._opener.finish()
        assert not bench.environments.sessions


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (not_found(Reason.UNKNOWN_SESSION, "lease expired"), trajectory_pb2.FAILURE_REASON_ENVIRONMENT_LOST),
        (
            RollwireError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "bug"),
            trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR,
        ),
        (
            RollwireError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TRANSPORT, "late"),
            trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT,
        ),
    ],
)
async def test_an_error_of_the_environment_server_fails_the_episode(serve: Any, error: Any, reason: int) -> None:
    async with serve() as bench:
        bench.environments.script.error_at, bench.environments.script.error = 2, error
        results = await bench.play()
        assert [failure.reason for failure in failures(results)] == [reason] * 3
        assert {failure.turn for failure in failures(results)} == {2}


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_fails_the_episode(serve: Any, reward: float) -> None:
    async with serve() as bench:
        bench.environments.script.reward = reward
        results = await bench.play()
        assert [failure.reason for failure in failures(results)] == [
            trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR
        ] * 3


async def test_an_environment_server_that_is_gone_loses_the_episodes(serve: Any) -> None:
    async with serve() as bench:
        results = await bench.play(environment_targets=["127.0.0.1:1"], timeout_s=60)
        assert [failure.reason for failure in failures(results)] == [trajectory_pb2.FAILURE_REASON_ENVIRONMENT_LOST] * 3


async def test_episodes_go_to_the_server_that_answers(serve: Any) -> None:
    async with serve() as bench:
        targets = ["127.0.0.1:1", bench.environment_address]
        assert len(trajectories(await bench.play(environment_targets=targets, timeout_s=60))) == 3


async def test_a_full_environment_server_is_asked_again(serve: Any) -> None:
    async with serve() as bench:
        bench.environments.script.open_errors = [exhausted(Reason.SESSIONS_EXHAUSTED, "full", 0.05)] * 4
        assert len(trajectories(await bench.play())) == 3


async def test_unknown_tags_are_refused_at_once_with_those_that_exist(serve: Any) -> None:
    async with serve() as bench:
        with pytest.raises(RollwireError, match="it offers: Lake") as caught:
            await bench.play(environment_tag="Lakes")
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_ENVIRONMENT)


async def test_the_turn_limit_of_the_session_cuts_the_episode(serve: Any) -> None:
    async with serve() as bench:
        bench.environments.script.never_ends = True
        bench.environments.script.max_turns = 2
        for trajectory in trajectories(await bench.play()):
            check_trajectory(trajectory)
            assert trajectory.end == trajectory_pb2.EPISODE_END_TRUNCATED
            assert [turn.truncated for turn in trajectory.turns] == [False, True]


async def test_the_token_limit_ends_the_episode_at_every_boundary(serve: Any) -> None:
    async with serve() as bench:
        bench.environments.script.never_ends = True
        (whole, *_) = trajectories(await bench.play(episode_indices=[0]))
        ends = {turn.index: turn.response.end for turn in whole.turns}
        opening, second = whole.turns[0].prompt.end, whole.turns[1].prompt.end
        cases = {
            opening: "prompt too long",
            opening + 1: 1,
            ends[0]: 1,  # no room for the second prompt
            second: 1,  # room for the prompt, not for an answer
            second + 1: 2,
            ends[1]: 2,
        }
        for limit, turns in cases.items():
            (result,) = await bench.play(episode_indices=[0], max_episode_tokens=limit)
            if isinstance(turns, str):
                assert result.failure.reason == trajectory_pb2.FAILURE_REASON_PROMPT_TOO_LONG
                continue
            trajectory = result.trajectory
            check_trajectory(trajectory)
            assert trajectory.end == trajectory_pb2.EPISODE_END_TOKEN_LIMIT, limit
            assert len(trajectory.turns) == turns, limit
            assert len(trajectory.sequences[0].token_ids) <= limit
            assert list(trajectory.sequences[0].token_ids) == list(
                whole.sequences[0].token_ids[: len(trajectory.sequences[0].token_ids)]
            )
        (cut,) = trajectories(await bench.play(episode_indices=[0], max_episode_tokens=opening + 1))
        assert cut.turns[0].stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT


async def test_an_answer_that_was_cut_is_closed_with_mask_zero(serve: Any) -> None:
    async with serve() as bench:
        sampling = trajectory_pb2.SamplingSettings(max_tokens=2, stop_token_ids=[0])
        for trajectory in trajectories(await bench.play(sampling=sampling)):
            check_trajectory(trajectory)
            sequence = trajectory.sequences[0]
            end_of_turn = sequence.token_ids[trajectory.turns[0].prompt.end - 4 : trajectory.turns[0].prompt.end]
            assert len(end_of_turn) == 4
            for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
                assert turn.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS
                # The first token of the next prompt ends the assistant's message, as it does in every user's.
                assert sequence.token_ids[following.prompt.begin] in sequence.token_ids[: turn.prompt.end]
                assert not sequence.loss_mask[following.prompt.begin]


async def test_the_suffix_of_an_environment_ends_the_prompt(serve: Any) -> None:
    async with serve() as bench:
        bench.environments.script.suffix = "XXXX"
        with_suffix = trajectories(await bench.play(episode_indices=[0]))[0]
        bench.environments.script.suffix = ""
        without = trajectories(await bench.play(episode_indices=[0]))[0]
        lengths = [[turn.prompt.end - turn.prompt.begin for turn in t.turns[:2]] for t in (with_suffix, without)]
        assert lengths[0][0] == lengths[1][0] and lengths[0][1] == lengths[1][1] + 4


async def test_an_episode_that_takes_too_long_fails_and_the_others_do_not(serve: Any) -> None:
    async with serve() as bench:
        bench.environments.script.step_s = 5.0
        results = await bench.play(episode_timeout=Duration(nanos=200_000_000))
        assert [failure.reason for failure in failures(results)] == [
            trajectory_pb2.FAILURE_REASON_DEADLINE_EXCEEDED
        ] * 3
        # The call's own deadline does the same, early enough to be reported.
        results = await bench.play(timeout_s=1.0)
        assert [failure.reason for failure in failures(results)] == [
            trajectory_pb2.FAILURE_REASON_DEADLINE_EXCEEDED
        ] * 3
        assert (await bench.client.get_info()).running_episodes == 0


async def test_cancelling_frees_everything(serve: Any) -> None:
    async with serve() as bench:
        bench.environments.script.step_s = 0.05
        bench.environments.script.never_ends = True
        stream = bench.client.run_group(bench.group(), timeout_s=20)
        waiting = asyncio.create_task(anext(stream))
        await bench.environments.stepped.wait()
        assert (await bench.client.get_info()).running_episodes == 3
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for _ in range(200):
            if (await bench.client.get_info()).running_episodes == 0 and not bench.environments.sessions:
                break
            await asyncio.sleep(0.01)
        assert not bench.environments.sessions
        assert (await bench.client.get_info()).running_episodes == 0
        policy = bench.server._servicer.parts.policy
        assert await policy.drain(5)
        assert not policy.engine._loop._scheduler._idle


async def test_more_episodes_than_the_capacity_are_refused_with_a_delay(serve: Any) -> None:
    async with serve(rollout={"max_episodes": 4}) as bench:
        bench.environments.script.step_s = 0.2
        first = asyncio.create_task(bench.play())
        await bench.environments.stepped.wait()
        with pytest.raises(RollwireError) as caught:
            await bench.play(group_id="g2")
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.EPISODES_EXHAUSTED,
        )
        assert caught.value.retry_after_s == 1.0
        assert len(await first) == 3
        assert len(await bench.play(group_id="g2")) == 3


async def test_more_episodes_than_slots_wait_for_their_turn(serve: Any) -> None:
    async with serve(rollout={"max_concurrent_sequences": 2}) as bench:
        results = await bench.play(episodes=12)
        assert sorted(t.episode_index for t in trajectories(results)) == list(range(12))


async def test_turns_that_new_weights_cut_are_drawn_again_under_one_version(serve: Any) -> None:
    async with serve() as bench:
        bench.server._servicer.parts.updater._drain_s = 0.0
        bench.environments.script.step_s = 0.02
        bench.environments.script.never_ends = True
        bench.environments.script.max_turns = 100
        sampling = trajectory_pb2.SamplingSettings(max_tokens=8, stop_token_ids=[0])
        playing = asyncio.create_task(bench.play(sampling=sampling))
        await bench.environments.stepped.wait()
        for step in (1, 2, 3):
            await asyncio.sleep(0.03)
            await bench.update(step)
        bench.environments.script.never_ends = False
        played = trajectories(await playing)
        assert len(played) == 3
        seen: set[int] = set()
        for trajectory in played:
            check_trajectory(trajectory)
            spans = trajectory.sequences[0].version_spans
            # One span per turn, so no turn mixes versions; versions only rise.
            assert [span.range for span in spans] == [turn.response for turn in trajectory.turns]
            steps = [span.version.step for span in spans]
            assert steps == sorted(steps)
            seen |= set(steps)
        assert 0 in seen and len(seen) > 1


async def test_a_policy_that_does_not_answer_or_fails_is_a_failure(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        policy = bench.server._servicer.parts.policy
        with monkeypatch.context() as patch:
            patch.setattr("rollwire.rollout.episode.GENERATION_TIMEOUT_S", 0.05)
            policy.close_gate(Hold.UPDATE)
            results = await bench.play()
            policy.open_gate(Hold.UPDATE)
        assert [failure.reason for failure in failures(results)] == [
            trajectory_pb2.FAILURE_REASON_GENERATION_TIMEOUT
        ] * 3
        with monkeypatch.context() as patch:
            patch.setattr(policy.engine._loop._runner, "logits", lambda chunks: 1 / 0)
            results = await bench.play()
        assert [failure.reason for failure in failures(results)] == [trajectory_pb2.FAILURE_REASON_GENERATION_ERROR] * 3
        assert all("ZeroDivisionError" in failure.message for failure in failures(results))
        assert len(trajectories(await bench.play())) == 3


async def test_a_bug_in_the_episode_loop_is_a_failure_with_an_incident(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as bench:
        monkeypatch.setattr("rollwire.rollout.chat.ChatEncoder.text", lambda *_, **__: 1 / 0)
        results = await bench.play()
        assert len(failures(results)) == 3
        for failure in failures(results):
            assert failure.reason == trajectory_pb2.FAILURE_REASON_GENERATION_ERROR
            assert "incident-" in failure.message
        await bench.server._opener.finish()
        assert not bench.environments.sessions


async def test_a_trajectory_that_fits_no_message_is_a_failure(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        monkeypatch.setattr("rollwire.rollout.episode.INTERNAL_MESSAGE_BYTES", 100)
        for failure in failures(await bench.play()):
            assert "rollout.max_episode_tokens" in failure.message


async def test_every_turn_is_a_sequence_where_the_template_cannot_extend(serve: Any, tmp_path: Path) -> None:
    template = tmp_path / "forgetful.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}\n{% endif %}{% endfor %}>"
    )
    async with serve(model={"chat_template": str(template)}) as bench:
        for trajectory in trajectories(await bench.play()):
            check_trajectory(trajectory)
            assert len(trajectory.sequences) == len(trajectory.turns) == 3
            assert [turn.sequence for turn in trajectory.turns] == [0, 1, 2]
            lengths = [len(sequence.token_ids) for sequence in trajectory.sequences]
            assert lengths == sorted(lengths)


async def test_required_version(serve: Any) -> None:
    async with serve(active=2) as bench:
        assert len(await bench.play(required_version=bench.version(2))) == 3
        with pytest.raises(RollwireError, match="lineage-test@2 is active") as caught:
            await bench.play(required_version=bench.version(1))
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_VERSION)
        with pytest.raises(RollwireError) as caught:
            await bench.play(required_version=weights_pb2.WeightVersion(step=1))
        assert list(caught.value.fields) == ["required_version.lineage"]


async def test_bad_requests_and_replaced_coordinators(serve: Any) -> None:
    async with serve() as bench:
        for changes, field in (
            ({"group_id": "a/b"}, "group_id"),
            ({"episodes": 0}, "episodes"),
            ({"sampling": trajectory_pb2.SamplingSettings()}, "sampling.max_tokens"),
            ({"fence": trajectory_pb2.Fence()}, "fence.run_id"),
        ):
            with pytest.raises(RollwireError) as caught:
                await bench.play(**changes)
            assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT and list(caught.value.fields) == [field]
        assert len(await bench.play(fence=trajectory_pb2.Fence(run_id="run", epoch=2))) == 3
        with pytest.raises(RollwireError) as caught:
            await bench.play()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, Reason.FENCED)


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
async def test_an_episode_that_ends_while_it_generates_aborts_in_the_engine(
    serve: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with serve() as bench:
        policy = bench.server._servicer.parts.policy
        entered, aborted = asyncio.Event(), 0
        generate = policy.engine.generate

        async def held(request: Any) -> Any:
            nonlocal aborted
            async with aclosing(generate(request)) as pieces:
                async for piece in pieces:
                    entered.set()
                    try:
                        await asyncio.Event().wait()
                    finally:
                        aborted += 1
                    yield piece

        monkeypatch.setattr(policy.engine, "generate", held)
        if how == "out of time":
            results = await bench.play(episode_timeout=Duration(nanos=500_000_000))
            assert {f.reason for f in failures(results)} == {trajectory_pb2.FAILURE_REASON_DEADLINE_EXCEEDED}
        else:
            playing = asyncio.create_task(bench.play())
            await entered.wait()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        assert await policy.drain(20)
        assert aborted > 0
        monkeypatch.undo()
        assert len(trajectories(await bench.play(group_id="g2"))) == 3
