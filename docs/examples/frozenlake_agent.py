"""Trains FrozenLake from an agent that keeps its own loop, with the official `openai` package.

pip install 'openai>=2'
rollwire launch deploy/configs/frozenlake-agent.yaml coordinator.port=7700
python docs/examples/frozenlake_agent.py 127.0.0.1:7700
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import openai

from rollwire.client import Reason, RollwireError, RunEndedError, agent_session
from rollwire.environment.frozen_lake import FrozenLake
from rollwire.rollout.prompts import PromptTemplates

TAG = "FrozenLakeAgent"
PROMPTS = PromptTemplates()


def play(target: str) -> None:
    """Plays one episode."""
    with agent_session(target, TAG) as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        lake = FrozenLake(**session.options)
        observation, info = lake.reset(session.seed)
        messages = PROMPTS.first_messages(info["instructions"], observation, 0, lake.max_turns, session.max_tokens)
        rewards: dict[str, float] = {}
        terminated = truncated = False
        for turn in range(lake.max_turns):
            reply = client.chat.completions.create(model=session.model, messages=messages)
            text = reply.choices[0].message.content or ""
            observation, rewards[reply.id], terminated, truncated, info = lake.step(text)
            if terminated or truncated:
                break
            messages.append({"role": "assistant", "content": text})
            messages += PROMPTS.next_messages(observation, turn + 1, lake.max_turns - turn - 1, session.max_tokens)
        success = info["metrics"]["success"]
        session.finish(0.0, call_rewards=rewards, metrics={"success": success}, truncated=not terminated)


def play_on(target: str) -> int:
    """Plays until the run has ended; returns the number of episodes."""
    played = 0
    while True:
        try:
            play(target)
            played += 1
        except RunEndedError:
            return played
        except openai.APIError as error:  # the session was closed as failed, and is offered again
            print(f"an episode failed: {error}")
        except RollwireError as error:
            if error.reason != Reason.UNKNOWN_SESSION:
                raise SystemExit(str(error)) from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="host:port of the coordinator")
    parser.add_argument("--agents", type=int, default=16, help="episodes that are played at once")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.agents) as pool:
        episodes = sum(pool.map(play_on, [arguments.target] * arguments.agents))
    print(f"the run has ended; {episodes} episodes")
