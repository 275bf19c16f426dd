"""The example of docs/environments.md, run as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "guess.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("guess", None)


@pytest.mark.usefixtures("guess")
async def test_the_example_can_be_registered_and_played(serve: Any, opening: Any) -> None:
    async with serve(**yaml.safe_load(block("yaml"))["environment"]) as client:
        listed = {item.tag: item for item in (await client.list_environments()).environments}
        assert listed["Guess"].summary == "Find the number; the answers are higher, lower and found."
        assert listed["BigLake"].max_turns == 50
        opened = await client.open_session(opening("Guess"))
        assert "from 1 to 1000" in opened.instructions
        opened = await client.open_session(opening("Guess", highest=2, max_turns=3))
        first = await client.step(opened.session_id, 0, "none")
        assert (first.reward, first.observation) == (-0.1, "That is no number.")
        replies = [await client.step(opened.session_id, 1, "1")]
        if not replies[0].terminated:
            replies.append(await client.step(opened.session_id, 2, "2"))
        assert (replies[-1].observation, replies[-1].reward, replies[-1].metrics["found"]) == ("found", 1.0, 1.0)
