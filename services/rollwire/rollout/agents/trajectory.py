"""From the calls of a session to a trajectory: which calls share a sequence, and which tokens are trained. Pure.

Of the calls that extend the same call, the first continues its sequence. Every other one is a branch: it starts a
sequence whose prompt holds the tokens of the calls before it, so that no sampled token is trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollwire.rollout.agents.calls import Call
from rollwire.rollout.record import append_prompt, append_response
from rollwire.v1 import trajectory_pb2


def sequences_and_turns(
    calls: Sequence[Call], rewards: Mapping[int, float], *, truncated: bool
) -> tuple[list[trajectory_pb2.TokenSequence], list[trajectory_pb2.Turn]]:
    """Returns `Trajectory.sequences` and `Trajectory.turns`.

    Args:
        calls: The completed calls in the order of arrival, at least one.
        rewards: Reward by call number; 0 where there is none.
        truncated: True if the episode was cut; the last call's turn says so.
    """
    sequences: list[trajectory_pb2.TokenSequence] = []
    turns: list[trajectory_pb2.Turn] = []
    for chain in chains(calls):
        sequence = trajectory_pb2.TokenSequence()
        for call in chain:
            begin = len(sequence.token_ids)
            append_prompt(sequence, call.block if begin else call.prompt_ids())
            prompt_end = len(sequence.token_ids)
            append_response(sequence, call.pieces)
            last = call is calls[-1]
            turns.append(
                trajectory_pb2.Turn(
                    index=len(turns),
                    sequence=len(sequences),
                    prompt=trajectory_pb2.TokenRange(begin=begin, end=prompt_end),
                    response=trajectory_pb2.TokenRange(begin=prompt_end, end=len(sequence.token_ids)),
                    reward=rewards.get(call.number, 0.0),
                    terminated=last and not truncated,
                    truncated=last and truncated,
                    stop_reason=call.pieces[-1].stop_reason,
                    observation_digest=call.observation,
                )
            )
        sequences.append(sequence)
    return sequences, turns


def chains(calls: Sequence[Call]) -> list[list[Call]]:
    """Returns the calls that share a sequence, by the order in which the sequences began."""
    found: list[list[Call]] = []
    ends: dict[Call, list[Call]] = {}
    for call in calls:
        chain = None if call.parent is None else ends.pop(call.parent, None)
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(call)
        ends[call] = chain
    return found
