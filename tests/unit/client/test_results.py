"""What environments return and raise, turned into messages; nothing invalid gets through."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.client.png import encode_png
from rollwire.client.results import (
    MAX_METRICS,
    MAX_PICTURE_BYTES,
    MAX_TEXT_BYTES,
    InvalidResultError,
    aggregations,
    failure,
    failure_of,
    start_response,
    step_response,
    text_drawing,
)
from rollwire.v1 import environment_pb2 as pb


def reply(**changes: Any) -> tuple[Any, ...]:
    parts: dict[str, Any] = {"observation": "o", "reward": 0.5, "terminated": False, "truncated": False, "info": {}}
    return tuple({**parts, **changes}.values())


class Nasty:
    def __float__(self) -> float:
        raise RuntimeError("no")


def test_a_turn_is_copied_field_by_field() -> None:
    info = {"metrics": {"success": True, "env/steps": np.float32(2)}, "suffix": "go", "other": object()}
    response = step_response(reply(reward=np.float64(-1.5), terminated=np.bool_(True), info=info))
    assert response == pb.StepResponse(
        observation="o", reward=-1.5, terminated=True, suffix="go", metrics={"success": 1.0, "env/steps": 2.0}
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": math.nan}, "the reward is nan"),
        ({"reward": -math.inf}, "the reward is -inf"),
        ({"reward": 10**400}, "the reward is 1000"),
        ({"reward": 10**5000}, "the reward is a value of type int that cannot be shown"),
        ({"reward": "1"}, "the reward is of type str"),
        ({"reward": None}, "the reward is of type NoneType"),
        ({"reward": np.zeros(1)}, "the reward is of type ndarray"),
        ({"reward": Nasty()}, "the reward is of type Nasty"),
        ({"observation": 5}, "the observation is of type int"),
        ({"observation": b"o"}, "the observation is of type bytes"),
        ({"observation": "x" * (MAX_TEXT_BYTES + 1)}, f"the observation has {MAX_TEXT_BYTES + 1} bytes"),
        ({"observation": "√" * (MAX_TEXT_BYTES // 3 + 1)}, "the observation has"),
        ({"observation": "a\ud800"}, "lone surrogate at character 1"),
        ({"terminated": 1}, "terminated is of type int"),
        ({"truncated": None}, "truncated is of type NoneType"),
        ({"info": None}, "an info of type NoneType"),
        ({"info": {"suffix": 3}}, "info['suffix'] is of type int"),
        ({"info": {"metrics": [1]}}, "info['metrics'] is of type list"),
        ({"info": {"metrics": {"bad name": 1.0}}}, "a metric is named 'bad name'"),
        ({"info": {"metrics": {3: 1.0}}}, "a metric is named 3"),
        ({"info": {"metrics": {"m": math.inf}}}, "m is inf"),
        ({"info": {"metrics": {"m": "1"}}}, "m is of type str"),
        ({"info": {"metrics": {f"m{i}": 1.0 for i in range(MAX_METRICS + 1)}}}, "has 257 entries"),
    ],
)
def test_an_invalid_turn_says_what_is_wrong_and_what_is_allowed(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidResultError, match="allowed: ") as caught:
        step_response(reply(**changes))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("wrong", [None, "text", ("o", 1.0, False, {}), ["o", 1.0, False, False, {}], object()])
def test_a_turn_is_a_tuple_of_five(wrong: object) -> None:
    with pytest.raises(InvalidResultError, match=r"allowed: \(observation, reward, terminated, truncated, info\)"):
        step_response(wrong)


def test_the_limits_themselves_are_allowed() -> None:
    metrics = {f"m{i}": float(i) for i in range(MAX_METRICS)}
    response = step_response(reply(observation="x" * MAX_TEXT_BYTES, info={"metrics": metrics}))
    assert len(response.metrics) == MAX_METRICS
    assert len(response.observation) == MAX_TEXT_BYTES


def test_a_start_is_copied() -> None:
    found = start_response(("o", {"instructions": "i", "suffix": "s"}), np.int64(7))
    assert found == pb.OpenSessionResponse(observation="o", instructions="i", suffix="s", max_turns=7)


@pytest.mark.parametrize(
    ("start", "max_turns"),
    [("o", 1), (("o",), 1), (("o", None), 1), ((1, {}), 1), (("o", {"instructions": 1}), 1)]
    + [(("o", {}), wrong) for wrong in (0, -1, 2**32, 2.0, True, None, "3")],
)
def test_an_invalid_start(start: object, max_turns: object) -> None:
    with pytest.raises(InvalidResultError, match="allowed: "):
        start_response(start, max_turns)


def test_aggregations() -> None:
    assert aggregations({"a": "mean", "b/c": "last"}) == {
        "a": pb.METRIC_AGGREGATION_MEAN,
        "b/c": pb.METRIC_AGGREGATION_LAST,
    }
    for wrong in ({"a": "median"}, {"a": None}, {"a": []}, {"bad name": "mean"}, ["a"], 3):
        with pytest.raises(InvalidResultError, match="allowed: "):
            aggregations(wrong)


def test_drawings_are_checked_as_text() -> None:
    assert text_drawing("###") == "###"
    with pytest.raises(InvalidResultError, match="the drawing is of type NoneType"):
        text_drawing(None)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "type_name", "message"),
    [
        (ZeroDivisionError("division by zero"), "ERROR", "ZeroDivisionError", "division by zero"),
        (InvalidResultError("the reward is nan"), "INVALID_RESULT", "InvalidResult", "the reward is nan"),
        (
            FileNotFoundError(2, "No such file or directory", "/srv/secret"),
            "ERROR",
            "FileNotFoundError",
            "No such file or directory",
        ),
        (ValueError("cannot read /home/me/run/a.txt: bad"), "ERROR", "ValueError", "cannot read <path>: bad"),
        (ValueError('File "/opt/x.py", line 3'), "ERROR", "ValueError", "File <path>, line 3"),
        (ValueError("see https://host/a/b and </answer>"), "ERROR", "ValueError", "see https://host/a/b and </answer>"),
        (ValueError("one\n\ttwo\x1b[31m"), "ERROR", "ValueError", "one two?[31m"),
        (SystemExit(3), "ERROR", "SystemExit", "3"),
        (KeyboardInterrupt(), "ERROR", "KeyboardInterrupt", ""),
        (MuteError(), "ERROR", "MuteError", "(its text cannot be produced)"),
    ],
)
def test_an_error_becomes_one_line_without_paths(error: BaseException, kind: str, type_name: str, message: str) -> None:
    found = failure_of(error)
    assert pb.EnvironmentFailureKind.Name(found.kind) == f"ENVIRONMENT_FAILURE_KIND_{kind}"
    assert (found.type, found.message) == (type_name, message)


PICTURE = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)


@pytest.mark.parametrize(
    "info",
    [
        {"observation_png": encode_png(PICTURE)},
        {"observation_rgb": PICTURE},
        {"observation_rgb": PICTURE[:, ::-1][:, ::-1]},
    ],
)
def test_a_picture_goes_beside_the_text(info: dict[str, Any]) -> None:
    assert step_response(reply(info=info)).observation_png == encode_png(PICTURE)
    assert start_response(("o", info), 3).observation_png == encode_png(PICTURE)


@pytest.mark.parametrize("info", [{}, {"observation_png": None}, {"observation_png": b""}, {"observation_rgb": None}])
def test_without_a_picture_the_field_is_empty(info: dict[str, Any]) -> None:
    assert step_response(reply(info=info)) == pb.StepResponse(observation="o", reward=0.5)
    assert not start_response(("o", info), 3).observation_png


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"observation_png": "text"}, "is a value of type str; allowed: the bytes of a PNG file"),
        ({"observation_png": PICTURE}, "is a value of type ndarray; allowed: the bytes of a PNG file"),
        ({"observation_png": b"GIF89a"}, "allowed: the bytes of a PNG file"),
        (
            {"observation_png": encode_png(PICTURE) + bytes(MAX_PICTURE_BYTES)},
            f"bytes as PNG; allowed: at most {MAX_PICTURE_BYTES}",
        ),
        ({"observation_rgb": PICTURE.astype(np.float32)}, "the picture is float32[3, 4, 3]; allowed: uint8"),
        ({"observation_rgb": [[1]]}, "the picture is list; allowed: uint8"),
        (
            {"observation_rgb": np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)},
            f"bytes as PNG; allowed: at most {MAX_PICTURE_BYTES}",
        ),
        ({"observation_png": encode_png(PICTURE), "observation_rgb": PICTURE}, "allowed: one of them"),
    ],
)
def test_a_picture_outside_the_contract_is_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidResultError) as caught:
        step_response(reply(info=info))
    assert says in str(caught.value)
    with pytest.raises(InvalidResultError):
        start_response(("o", info), 3)


@given(st.text(st.characters(), max_size=300), st.integers(1, 100), st.text(max_size=200))
def test_a_failure_always_keeps_the_limits_of_the_contract(text: str, times: int, type_name: str) -> None:
    found = failure(pb.ENVIRONMENT_FAILURE_KIND_ERROR, type_name, text * times)
    assert len(found.message.encode()) <= 4096
    assert len(found.type) <= 128
    assert all(c.isprintable() for c in found.message)
    assert pb.EnvironmentFailure.FromString(found.SerializeToString()) == found
