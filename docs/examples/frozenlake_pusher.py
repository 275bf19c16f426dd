"""Trains FrozenLake from outside: plays it, draws tokens with `Generate`, pushes the episodes.

rollwire launch deploy/configs/frozenlake-pushed.yaml coordinator.port=7700
python docs/examples/frozenlake_pusher.py 127.0.0.1:7700
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

from rollwire.client import RolloutClient, RollwireError, RunEndedError, TrajectoryBuilder, TrajectoryPusher
from rollwire.environment.frozen_lake import FrozenLake
from rollwire.rollout.chat import ChatEncoder
from rollwire.rollout.prompts import PromptTemplates
from rollwire.rpc.ids import new_id
from rollwire.serving.config.sections import ModelSection
from rollwire.serving.model_files import load_tokenizer
from rollwire.v1 import coordinator_pb2, rollout_pb2, trajectory_pb2

TAG = "FrozenLakePushed"
Terms = coordinator_pb2.GetSubmissionTermsResponse


class Player:
    """Plays episodes with one rollout server."""

    def __init__(self, policy: RolloutClient, encoder: ChatEncoder) -> None:
        self._policy = policy
        self._encoder = encoder
        self._prompts = PromptTemplates()

    async def play(self, terms: Terms, group_id: str, index: int, seed: int) -> trajectory_pb2.Trajectory:
        """Plays one episode of a group to its end."""
        episode = TrajectoryBuilder(terms, TAG, group_id=group_id, episode_index=index, environment_seed=seed)
        lake, most = FrozenLake(), terms.sampling.max_tokens
        observation, info = lake.reset(seed)
        prompt = self._encoder.opening(
            self._prompts.first_messages(info["instructions"], observation, 0, lake.max_turns, most)
        )
        for turn in range(lake.max_turns):
            pieces = await self._generate(prompt, terms)
            drawn = [token for piece in pieces for token in piece.token_ids]
            stopped = pieces[-1].stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN
            shown = observation
            observation, reward, terminated, truncated, info = lake.step(self._encoder.text(drawn, stopped=stopped))
            episode.add_turn(
                prompt, pieces, reward=reward, terminated=terminated, truncated=truncated, observation=shown
            )
            if terminated or truncated:
                break
            (message,) = self._prompts.next_messages(observation, turn + 1, lake.max_turns - turn - 1, most)
            prompt = episode.token_ids + self._encoder.continuation(message, drawn, stopped=stopped)
            if len(prompt) + most > terms.max_sequence_tokens:
                break
        return episode.build({"success": info["metrics"]["success"]})

    async def _generate(self, prompt: Sequence[int], terms: Terms) -> list[rollout_pb2.GenerateResponse]:
        """Draws a response, again when a weight update cut it short."""
        while True:
            request = rollout_pb2.GenerateRequest(token_ids=prompt, sampling=terms.sampling, seed=secrets.randbits(63))
            pieces = [piece async for piece in self._policy.generate(request)]
            if pieces[-1].stop_reason != trajectory_pb2.STOP_REASON_ABORTED:
                return pieces


async def play_groups(pusher: TrajectoryPusher, encoder: ChatEncoder) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """Yields the episodes of group after group, as many as the run wants."""
    terms = await pusher.wait_wanted()
    async with RolloutClient(terms.rollout_targets[0]) as policy:
        player = Player(policy, encoder)
        while True:
            groups = [(new_id("lake"), secrets.randbits(32)) for _ in range(terms.groups_wanted)]
            episodes = await asyncio.gather(
                *(
                    player.play(terms, group_id, index, seed)
                    for group_id, seed in groups
                    for index in range(terms.episodes_per_group)
                )
            )
            for episode in episodes:
                yield episode
            terms = await pusher.wait_wanted()


async def main(target: str, model: str) -> None:
    """Plays until the run has ended."""
    encoder = ChatEncoder(load_tokenizer(ModelSection(path=model)))
    counts: dict[str, int] = {}
    async with TrajectoryPusher(target, TAG) as pusher:
        try:
            async for answer in pusher.submit(play_groups(pusher, encoder)):
                status = coordinator_pb2.SubmissionStatus.Name(answer.status).removeprefix("SUBMISSION_STATUS_")
                counts[status] = counts.get(status, 0) + 1
                if answer.status == coordinator_pb2.SUBMISSION_STATUS_REJECTED:
                    raise SystemExit(f"{answer.trajectory_id}: {answer.message}")
        except RunEndedError:
            print("the run has ended;", counts)
        except RollwireError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="host:port of the coordinator")
    parser.add_argument("--model", default="builtin:tiny", help="model.path of the run, for its tokenizer")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.target, arguments.model))
