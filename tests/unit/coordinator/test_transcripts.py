from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollwire.coordinator.transcripts import MAX_TEXT_CHARS, Transcripts
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = ["<unk>", "see", "the", "goal", "Right", "```\n# fence", *(f"w{number}" for number in range(10_000))]
    Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    return tmp_path


def test_an_episode_reads_as_prompt_and_response(model: Path, make_trajectory: Maker) -> None:
    text = Transcripts(str(model)).render(make_trajectory(score=1.0, turns=[(3, 2)]))
    assert "**FrozenLake** · seed 7 · score 1" in text
    assert "    see the goal" in text
    assert "*Response, reward 1*\n\n    Right ```\n    # fence" in text, "no text can end its block"


def test_long_episodes_are_cut(model: Path, make_trajectory: Maker) -> None:
    text = Transcripts(str(model)).render(make_trajectory(turns=[(9000, 2)]))
    assert len(text) < MAX_TEXT_CHARS + 20 and text.endswith("(cut)")


@pytest.mark.parametrize("content", [None, "{broken"])
def test_without_a_tokenizer_there_are_no_texts_and_no_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert not Transcripts(str(tmp_path)).available
    assert not Transcripts("builtin:nothing").available
