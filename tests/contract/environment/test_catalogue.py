"""What a server offers: built-in tags, tags of its configuration, and how they describe and draw themselves."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from PIL import Image

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.registry import BUILT_IN
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]


async def catalogue(client: EnvironmentClient) -> dict[str, pb.EnvironmentDescription]:
    return {item.tag: item for item in (await client.list_environments()).environments}


async def test_the_catalogue_is_sorted_and_counts_sessions(client: EnvironmentClient, opening: Opening) -> None:
    await client.open_session(opening())
    listed = await client.list_environments()
    tags = [item.tag for item in listed.environments]
    assert tags == sorted({*BUILT_IN, "BigLake", "Blind", "Counting", "Troublesome"})
    assert (listed.session_capacity, listed.open_sessions) == (1024, 1)


async def test_frozen_lake_describes_itself(client: EnvironmentClient) -> None:
    found = (await catalogue(client))["FrozenLake"]
    assert found.summary == "A lake crossed in turns; the map and the slips follow from the seed given to `reset`."
    assert found.max_turns == 10
    options = MessageToDict(found.default_options)
    options.pop("env_instruction")
    assert options == {"size": 4, "p": 0.8, "is_slippery": False, "max_steps": 10, "format_penalty": -0.01}
    assert list(found.render_formats) == [pb.RENDER_FORMAT_TEXT, pb.RENDER_FORMAT_PNG]
    assert dict(found.metric_aggregation) == {
        "action_is_effective": pb.METRIC_AGGREGATION_MEAN,
        "action_is_valid": pb.METRIC_AGGREGATION_MEAN,
        "success": pb.METRIC_AGGREGATION_LAST,
        "format_penalty": pb.METRIC_AGGREGATION_MEAN,
    }


async def test_every_default_option_can_be_sent_back(client: EnvironmentClient, opening: Opening) -> None:
    for tag, found in (await catalogue(client)).items():
        request = opening(tag)
        request.options.CopyFrom(found.default_options)
        opened = await client.open_session(request)
        assert not opened.HasField("failure")
        assert opened.max_turns == found.max_turns


async def test_a_built_in_environment_under_another_tag(client: EnvironmentClient, opening: Opening) -> None:
    found = (await catalogue(client))["BigLake"]
    assert (found.max_turns, found.default_options["size"]) == (50, 8)
    opened = await client.open_session(opening("BigLake"))
    assert (len(opened.observation.splitlines()), opened.max_turns) == (8, 50)
    smaller = await client.open_session(opening("BigLake", size=5))
    assert (len(smaller.observation.splitlines()), smaller.max_turns) == (5, 50)


async def test_a_built_in_tag_with_other_options(serve: Any, opening: Opening) -> None:
    definitions = {"FrozenLake": {"type": "FrozenLakeThink", "options": {"max_steps": 3}}}
    async with serve(definitions=definitions) as client:
        opened = await client.open_session(opening("FrozenLake"))
        assert opened.max_turns == 3
        reply = await client.step(opened.session_id, 0, "<answer>Left</answer>")
        assert reply.metrics["action_is_valid"] == 0.0


async def test_a_custom_environment_describes_itself(client: EnvironmentClient, opening: Opening) -> None:
    found = (await catalogue(client))["Counting"]
    assert (found.summary, found.max_turns) == ("Counts its turns.", 3)
    assert MessageToDict(found.default_options) == {"limit": 3, "start": 0, "note": ""}
    assert list(found.render_formats) == [pb.RENDER_FORMAT_TEXT]
    assert dict(found.metric_aggregation) == {"turn": pb.METRIC_AGGREGATION_LAST}
    opened = await client.open_session(opening("Counting"))
    await client.step(opened.session_id, 0, "a")
    # What only the turns declare is known from then on.
    assert (await catalogue(client))["Counting"].metric_aggregation["late"] == pb.METRIC_AGGREGATION_SUM


async def test_a_custom_environment_from_an_entry_point(
    serve: Any, opening: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "someones_games-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-games\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwire.environments]\ncount-up = troublesome:Counting\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with serve(definitions={"Upwards": {"type": "count-up", "options": {"start": 5}}}) as client:
        opened = await client.open_session(opening("Upwards"))
        assert (await client.step(opened.session_id, 0, "a")).observation == "6: a"


async def test_drawings_of_frozen_lake(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening(seed=42))
    drawn = await client.render(opened.session_id, pb.RENDER_FORMAT_TEXT)
    assert (drawn.WhichOneof("drawing"), drawn.text) == ("text", opened.observation)
    before = Image.open(io.BytesIO((await client.render(opened.session_id, pb.RENDER_FORMAT_PNG)).png))
    await client.step(opened.session_id, 0, "<answer>Left</answer>")
    after = Image.open(io.BytesIO((await client.render(opened.session_id, pb.RENDER_FORMAT_PNG)).png))
    assert before.size == after.size == (192, 192)
    changed = np.argwhere((np.asarray(before) != np.asarray(after)).any(axis=2)) // 48
    assert {tuple(tile) for tile in changed.tolist()} == {(0, 1), (0, 2)}


async def test_drawings_after_the_end(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening("Counting"))
    await client.step(opened.session_id, 0, "stop")
    assert (await client.render(opened.session_id, pb.RENDER_FORMAT_TEXT)).text == "count 1"


@pytest.mark.parametrize("size", [2, 64])
async def test_the_smallest_and_the_largest_lake_can_be_drawn(
    client: EnvironmentClient, opening: Opening, size: int
) -> None:
    opened = await client.open_session(opening(size=size))
    picture = Image.open(io.BytesIO((await client.render(opened.session_id, pb.RENDER_FORMAT_PNG)).png))
    assert picture.size == (size * 48, size * 48)


@pytest.mark.parametrize(
    ("tag", "render_format"), [("Blind", pb.RENDER_FORMAT_TEXT), ("Counting", pb.RENDER_FORMAT_PNG)]
)
async def test_a_drawing_that_is_not_offered(
    client: EnvironmentClient, opening: Opening, tag: str, render_format: pb.RenderFormat.ValueType
) -> None:
    opened = await client.open_session(opening(tag))
    with pytest.raises(RollwireError) as caught:
        await client.render(opened.session_id, render_format)
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        Reason.RENDER_UNSUPPORTED,
    )


async def test_the_server_gets_ready(client: EnvironmentClient) -> None:
    assert await client.wait_ready(5)


def test_an_environment_server_needs_no_torch() -> None:
    heavy = {"torch", "transformers", "gymnasium"}
    code = f"import sys, rollwire.environment.service; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
