"""Sleep and wake of the learner: its states, and what happens when the device has no room."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rollwire.learner import codec
from rollwire.learner.device_memory import DeviceMemory
from rollwire.learner.distributed import Ranks
from rollwire.learner.sleep_states import SleepState, SleepStates
from rollwire.rpc.errors import Reason, RollwireError, exhausted


def test_a_learner_falls_asleep_and_wakes() -> None:
    states, seen = SleepStates(), []
    for ask in (states.fall_asleep, states.wake):
        assert ask()
        seen.append(states.state)
        assert states.asleep
        states.ended()
        seen.append(states.state)
        assert not ask(), "a repeat does nothing"
    assert seen == [SleepState.FALLING_ASLEEP, SleepState.ASLEEP, SleepState.WAKING, SleepState.AWAKE]


@pytest.mark.parametrize("waking", [False, True])
@pytest.mark.parametrize("wakes", [False, True])
def test_a_transition_that_fails_leaves_it_half_asleep_from_where_it_can_do_both(waking: bool, wakes: bool) -> None:
    states = SleepStates()
    states.fall_asleep()
    if waking:
        states.ended()
        states.wake()
    states.failed()
    assert states.asleep
    assert states.wake() if wakes else states.fall_asleep()
    states.ended()
    assert states.state is (SleepState.AWAKE if wakes else SleepState.ASLEEP)


def test_only_an_awake_learner_computes() -> None:
    states = SleepStates()
    states.require_awake("Train")
    states.fall_asleep()
    with pytest.raises(RollwireError, match="call Wake, then Train again") as caught:
        states.require_awake("Train")
    assert caught.value.reason == Reason.ASLEEP


class Recorded(DeviceMemory):
    """Moves nothing but notes where everything is; the device has room for so many things."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.on_device: set[int] = set()
        self.room = 100

    def _move_model(self, model: Any, place: torch.device) -> None:
        self._put(id(model), place)

    def _moved_tensor(self, value: torch.Tensor, place: torch.device) -> torch.Tensor:
        self._put(id(value), place)
        return value

    def _put(self, thing: int, place: torch.device) -> None:
        if place.type == "cpu":
            self.on_device.discard(thing)
            return
        if len(self.on_device) >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        self.on_device.add(thing)


def test_without_room_everything_stays_in_host_memory_and_the_next_time_it_wakes() -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    memory = Recorded(models, [], torch.device("meta"), Ranks())
    memory.on_device = {id(model) for model in models}
    memory._to_host = lambda: [memory._move_model(model, torch.device("cpu")) for model in models]  # type: ignore[assignment,method-assign]

    memory._to_host()
    assert not memory.on_device
    memory.room = 1
    with pytest.raises(RollwireError, match="the learner stays asleep") as caught:
        memory.come_back()
    assert caught.value.reason == Reason.DEVICE_MEMORY_EXHAUSTED
    assert caught.value.retry_after_s
    assert not memory.on_device

    memory.room = 2
    memory.come_back()
    assert memory.on_device == {id(model) for model in models}


class WithAnother(Ranks):
    """This rank beside another one that told something."""

    def __init__(self, told: object) -> None:
        super().__init__()
        self._told = told

    def gather(self, value: object) -> list[Any]:
        return [value, codec.decode(codec.encode(self._told))]


def test_where_another_rank_has_no_room_this_one_answers_with_its_error() -> None:
    problem = exhausted(Reason.DEVICE_MEMORY_EXHAUSTED, "no room on rank 1", 2.0, device="1")
    told: list[object] = []

    class Telling(Ranks):
        def gather(self, value: object) -> list[Any]:
            told.append(value)
            return [value]

    with pytest.raises(RollwireError):
        Telling().agree(problem)
    memory = Recorded([torch.nn.Linear(2, 2)], [], torch.device("cpu"), WithAnother(told[0]))
    with pytest.raises(RollwireError) as caught:
        memory.come_back()
    assert vars(caught.value) == vars(problem)
    WithAnother(None).agree(None)


def test_on_cpu_nothing_is_moved_or_freed() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before, parameters = copy.deepcopy(optimizer.state_dict()), list(model.parameters())
    memory = DeviceMemory([model], [optimizer], torch.device("cpu"), Ranks())

    assert memory.leave() == 0
    memory.come_back()

    assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
    for number, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][number][key], value)
