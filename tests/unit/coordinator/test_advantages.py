"""Every estimator against loops that share no code with it, and what must hold between estimators."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.coordinator.advantages import ESTIMATORS, Estimate, dr_grpo, grpo, reinforce, rloo, whiten
from rollwire.coordinator.batch_view import BatchView, decayed_sums
from rollwire.serving.config.algorithm import AlgorithmSection

SCORES = st.lists(st.floats(-10, 10), min_size=2, max_size=16)
GROUP_FUNCTIONS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": reinforce}


class Token:
    """One trained token of the plain implementation."""

    def __init__(self, reward: float, penalty: float, value: float) -> None:
        self.reward, self.penalty, self.value = reward, penalty, value


class Turn:
    """A turn: what it began with, its reward and its tokens."""

    def __init__(self, state: bytes, reward: float, tokens: list[Token]) -> None:
        self.state, self.reward, self.tokens = state, reward, tokens


Groups = list[list[list[Turn]]]


def make_groups(seed: int, *, penalties: bool = True) -> Groups:
    """Returns random groups of episodes of turns; some turns of a group begin alike."""
    source = random.Random(seed)

    def turn() -> Turn:
        count = source.randint(1, 4)
        tokens = [Token(0.0, source.gauss(0, 0.1) if penalties else 0.0, source.gauss(0, 1)) for _ in range(count)]
        reward = source.choice([0.0, 0.0, 1.0, -0.5])
        tokens[-1].reward = reward
        return Turn(source.choice([b"a", b"b", b"c", b""]), reward, tokens)

    return [[[turn() for _ in range(source.randint(1, 4))] for _ in range(3)] for _ in range(4)]


def view_of(groups: Groups) -> BatchView:
    episodes = [(number, episode) for number, group in enumerate(groups) for episode in group]
    turns = [(index, turn) for index, (_, episode) in enumerate(episodes) for turn in episode]
    tokens = [(index, token) for index, (_, turn) in enumerate(turns) for token in turn.tokens]
    return BatchView(
        episode_groups=np.array([number for number, _ in episodes]),
        episode_scores=np.array([sum(turn.reward for turn in episode) for _, episode in episodes]),
        turn_episodes=np.array([index for index, _ in turns]),
        turn_rewards=np.array([turn.reward for _, turn in turns]),
        turn_states=[turn.state for _, turn in turns],
        token_turns=np.array([index for index, _ in tokens]),
        token_penalties=np.array([token.penalty for _, token in tokens]),
        token_values=np.array([token.value for _, token in tokens]),
    )


def plain_normalise(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [0.0 if std <= 1e-6 else (value - mean) / (std + 1e-6) for value in values]


def plain_dr_grpo(scores: list[float]) -> list[float]:
    return [score - sum(scores) / len(scores) for score in scores]


def plain_rloo(scores: list[float]) -> list[float]:
    result = []
    for position, score in enumerate(scores):
        others = scores[:position] + scores[position + 1 :]
        result.append(score - sum(others) / len(others))
    return result


PLAIN_GROUP: dict[str, Callable[[list[float]], list[float]]] = {
    "grpo": plain_normalise,
    "dr_grpo": plain_dr_grpo,
    "rloo": plain_rloo,
    "reinforce": lambda scores: scores,
}


def penalty_to_go(episode: list[Turn], turn: int, token: int) -> float:
    rest = sum(item.penalty for item in episode[turn].tokens[token:])
    return rest + sum(item.penalty for later in episode[turn + 1 :] for item in later.tokens)


def plain_from_scores(name: str) -> Callable[[Groups, AlgorithmSection], list[float]]:
    def estimate(groups: Groups, algorithm: AlgorithmSection) -> list[float]:
        result = []
        for group in groups:
            own = PLAIN_GROUP[name]([sum(turn.reward for turn in episode) for episode in group])
            for episode, advantage in zip(group, own, strict=True):
                for number, turn in enumerate(episode):
                    for token in range(len(turn.tokens)):
                        result.append(advantage - penalty_to_go(episode, number, token))
        return result

    return estimate


def plain_step_reinforce(groups: Groups, algorithm: AlgorithmSection) -> list[float]:
    result = []
    for episode in (episode for group in groups for episode in group):
        for number, turn in enumerate(episode):
            gain = sum(algorithm.gamma**k * later.reward for k, later in enumerate(episode[number:]))
            result += [gain - penalty_to_go(episode, number, token) for token in range(len(turn.tokens))]
    return result


def plain_reinforce_plus_plus(groups: Groups, algorithm: AlgorithmSection) -> list[float]:
    result = []
    for episode in (episode for group in groups for episode in group):
        tokens = [token for turn in episode for token in turn.tokens]
        for position in range(len(tokens)):
            later = tokens[position:]
            result.append(sum(algorithm.gamma**k * (item.reward - item.penalty) for k, item in enumerate(later)))
    mean = sum(result) / len(result)
    variance = sum((value - mean) ** 2 for value in result) / (len(result) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in result]


def plain_gigpo(groups: Groups, algorithm: AlgorithmSection) -> list[float]:
    result = []
    for group in groups:
        of_episodes = plain_normalise([sum(turn.reward for turn in episode) for episode in group])
        gains: dict[tuple[int, int], float] = {}
        for e, episode in enumerate(group):
            for t in range(len(episode)):
                gains[e, t] = sum(algorithm.gamma**k * later.reward for k, later in enumerate(episode[t:]))
        for e, episode in enumerate(group):
            for t, turn in enumerate(episode):
                alike = [
                    (e2, t2)
                    for e2, other in enumerate(group)
                    for t2, later in enumerate(other)
                    if (later.state == turn.state and turn.state) or (e2, t2) == (e, t)
                ]
                normalised = plain_normalise([gains[place] for place in alike])[alike.index((e, t))]
                advantage = of_episodes[e] + algorithm.step_advantage_weight * normalised
                result += [advantage - penalty_to_go(episode, t, token) for token in range(len(turn.tokens))]
    return result


def plain_gae(groups: Groups, algorithm: AlgorithmSection) -> list[float]:
    result = []
    for episode in (episode for group in groups for episode in group):
        tokens = [token for turn in episode for token in turn.tokens]
        deltas = []
        for position, token in enumerate(tokens):
            following = tokens[position + 1].value if position + 1 < len(tokens) else 0.0
            deltas.append(token.reward - token.penalty + algorithm.gamma * following - token.value)
        decay = algorithm.gamma * algorithm.gae_lambda
        for position in range(len(tokens)):
            result.append(sum(decay**k * delta for k, delta in enumerate(deltas[position:])))
    return result


PLAIN: dict[str, Callable[[Groups, AlgorithmSection], list[float]]] = {
    **{name: plain_from_scores(name) for name in PLAIN_GROUP},
    "reinforce_plus_plus": plain_reinforce_plus_plus,
    "step_reinforce": plain_step_reinforce,
    "gigpo": plain_gigpo,
    "gae": plain_gae,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce_plus_plus": {"gamma": 0.9},
    "step_reinforce": {"gamma": 0.9},
    "gigpo": {"gamma": 0.95, "step_advantage_weight": 0.7},
    "gae": {"gamma": 0.98, "gae_lambda": 0.9},
}


def estimate(name: str, groups: Groups, **settings: Any) -> list[float]:
    algorithm = AlgorithmSection.model_validate({"advantage": name, **settings})
    found: list[float] = ESTIMATORS[name](view_of(groups), algorithm).advantages.tolist()
    return found


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(8))
def test_against_loops(name: str, seed: int) -> None:
    groups, settings = make_groups(seed), SETTINGS.get(name, {})

    expected = PLAIN[name](groups, AlgorithmSection.model_validate({"advantage": name, **settings}))

    assert estimate(name, groups, **settings) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
@given(scores=SCORES)
def test_functions_of_scores_against_loops(name: str, scores: list[float]) -> None:
    expected = PLAIN_GROUP[name](scores)
    if name == "grpo" and np.std(scores, ddof=1) < 1e-5:
        return  # near the threshold rounding decides between 0 and a value
    np.testing.assert_allclose(GROUP_FUNCTIONS[name](np.array(scores)), expected, rtol=1e-9, atol=1e-9)


def test_known_values() -> None:
    np.testing.assert_allclose(grpo(np.array([1.0, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(dr_grpo(np.array([1.0, 0, 0, 0])), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(rloo(np.array([1.0, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(reinforce(np.array([1.0, 0, 0.5])), [1, 0, 0.5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(value=st.floats(-100, 100), size=st.integers(2, 64))
def test_equal_scores_carry_no_signal(name: str, value: float, size: int) -> None:
    advantages = GROUP_FUNCTIONS[name](np.full(size, value))
    assert np.abs(advantages).max() <= 1e-6
    assert name != "grpo" or not advantages.any()


@pytest.mark.parametrize("seed", range(4))
def test_gae_without_discount_and_critic_is_reinforce(seed: int) -> None:
    """With γ = λ = 1 the values telescope away, whatever they are, and rewards to go are left."""
    groups = make_groups(seed)
    for token in (token for group in groups for episode in group for turn in episode for token in turn.tokens):
        token.value = 0.0

    assert estimate("gae", groups, gae_lambda=1.0) == pytest.approx(estimate("step_reinforce", groups))


@pytest.mark.parametrize("seed", range(4))
def test_gae_with_lambda_1_is_the_return_minus_the_prediction(seed: int) -> None:
    groups = make_groups(seed)
    algorithm = AlgorithmSection.model_validate({"advantage": "gae", "gae_lambda": 1.0})
    found = ESTIMATORS["gae"](view_of(groups), algorithm)
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx(estimate("step_reinforce", groups))


def test_rewards_of_the_last_turn_alone_make_step_reinforce_reinforce() -> None:
    groups = make_groups(3)
    for turn in (turn for group in groups for episode in group for turn in episode[:-1]):
        turn.reward = turn.tokens[-1].reward = 0.0

    assert estimate("step_reinforce", groups) == pytest.approx(estimate("reinforce", groups))


def test_gigpo_without_the_turns_part_or_without_states_is_grpo() -> None:
    groups = make_groups(1)
    assert estimate("gigpo", groups, step_advantage_weight=0.0) == pytest.approx(estimate("grpo", groups))
    for turn in (turn for group in groups for episode in group for turn in episode):
        turn.state = b""
    assert estimate("gigpo", groups) == pytest.approx(estimate("grpo", groups))


def test_equal_states_of_different_groups_are_not_compared() -> None:
    groups = make_groups(2)
    alone = estimate("gigpo", [groups[0]])

    assert estimate("gigpo", groups)[: len(alone)] == pytest.approx(alone)


def test_whitening_gives_mean_0_and_unbiased_variance_1() -> None:
    found = whiten(np.array([1.0, 2.0, 4.0, 9.0]))

    assert found.mean() == pytest.approx(0, abs=1e-12)
    assert found.var(ddof=1) == pytest.approx(1, rel=1e-6)
    assert whiten(np.array([3.0])).tolist() == [3.0]
    assert not whiten(np.full(5, 0.3)).any()


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=5), st.floats(0, 1))
def test_decayed_sums_against_loops(rows: list[list[float]], decay: float) -> None:
    values = np.array([value for row in rows for value in row])
    owner = np.array([index for index, row in enumerate(rows) for _ in row])

    expected = [sum(decay**k * later for k, later in enumerate(row[t:])) for row in rows for t in range(len(row))]
    np.testing.assert_allclose(decayed_sums(values, owner, decay), expected, rtol=1e-9, atol=1e-9)


def test_a_turn_without_a_trained_token_rewards_the_token_before() -> None:
    view = BatchView(
        episode_groups=np.array([0, 0]),
        episode_scores=np.array([6.0, 16.0]),
        turn_episodes=np.array([0, 0, 0, 1, 1]),
        turn_rewards=np.array([1.0, 2.0, 3.0, 7.0, 9.0]),
        turn_states=[b""] * 5,
        token_turns=np.array([0, 0, 2, 4]),
        token_penalties=np.zeros(4),
    )

    assert view.token_rewards.tolist() == [0, 3, 3, 9]  # nothing was done before the 7


def test_the_estimators_of_the_page_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Estimate" in code)
    names: dict[str, Any] = {}
    exec(source, names)
    groups, found = make_groups(3), {}
    for name, estimator in names["NEW"].items():
        found[name] = estimator(view_of(groups), AlgorithmSection()).advantages.tolist()
    monkeypatch.setitem(PLAIN_GROUP, "median_baseline", lambda s: [score - sorted(s)[len(s) // 2] for score in s])
    own_turn = [
        turn.reward - penalty_to_go(episode, number, token)
        for group in groups
        for episode in group
        for number, turn in enumerate(episode)
        for token in range(len(turn.tokens))
    ]
    assert found["median_baseline"] == pytest.approx(plain_from_scores("median_baseline")(groups, AlgorithmSection()))
    assert found["own_turn"] == pytest.approx(own_turn)


def test_the_page_names_every_field_of_view_and_estimate() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    names = [field.name for kind in (BatchView, Estimate) for field in dataclasses.fields(kind)]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_configuration_offers_exactly_the_registered_estimators() -> None:
    offered = typing.get_args(AlgorithmSection.model_fields["advantage"].annotation)
    assert set(offered) == set(ESTIMATORS) == set(PLAIN)
