"""Commands as bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.learner.codec import decode, encode
from rollwire.learner.objective import Aggregation, LossSettings
from rollwire.learner.samples import Sample
from rollwire.learner.step import StepSettings
from rollwire.v1 import weights_pb2

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
nested = st.recursive(
    plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner), max_leaves=20
)


@given(nested)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    back = decode(encode(value))
    assert back == value and repr(back) == repr(value)


def test_settings_come_back_equal() -> None:
    settings = StepSettings(LossSettings(aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM, clip_low=0.1), 3, 2**64 - 1)
    assert decode(encode([settings, ("a", settings)])) == [settings, ("a", settings)]


def test_samples_and_messages_come_back_bit_for_bit() -> None:
    advantages = np.array([0.1, -0.0, math.inf], np.float32)
    sample = Sample("s", np.arange(3), np.array([False, True, True]), advantages, -advantages, comparable=True)
    version = weights_pb2.WeightVersion(lineage="a", step=7)
    back, again = decode(encode({"samples": [sample], "version": version})).values()
    assert again == version
    assert back[0].sample_id == "s" and back[0].comparable is True
    for name in ("token_ids", "loss_mask", "advantages", "logprobs"):
        came, went = getattr(back[0], name), getattr(sample, name)
        assert came.dtype == went.dtype and came.tobytes() == went.tobytes() and came.flags.writeable


def test_arrays_of_any_shape_and_nan_come_back() -> None:
    for array in (np.zeros((2, 0, 3)), np.array(5, np.int64), np.asfortranarray(np.arange(6.0).reshape(2, 3))):
        back = decode(encode(array))
        assert back.shape == array.shape and back.dtype == array.dtype and (back == array).all()
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(np.float64(0.1))) == 0.1


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {1, 2}}, np.array([object()]), lambda: None])
def test_what_cannot_be_carried_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a command cannot carry"):
        encode(value)


@pytest.mark.parametrize(
    "forged",
    ['{"$":"enum","class":"os:system","name":"x"}', '{"$":"dataclass","class":"rollwire.learner.codec:encode"}'],
)
def test_only_classes_of_rollwire_are_looked_for(forged: str) -> None:
    with pytest.raises(TypeError, match="a command names"):
        decode(len(forged).to_bytes(8, "little") + forged.encode())
