"""Episodes as text for people to read. The coordinator has only token ids; the light `tokenizers` decodes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rollwire import policies
from rollwire.serving.logs import get_logger
from rollwire.v1 import trajectory_pb2

MAX_TEXT_CHARS: Final = 20_000
"""An episode's text is cut after this many characters."""

_log = get_logger(__name__)


class Transcripts:
    """Renders trajectories with the tokenizer of the policy.

    Where the model directory, its `tokenizer.json` or the `tokenizers` package is not on this host, there are no
    texts and the log says so once.

    Args:
        model_path: `model.path` of the configuration.
    """

    def __init__(self, model_path: str) -> None:
        self._tokenizer = _load_tokenizer(model_path)

    @property
    def available(self) -> bool:
        """True if texts can be made."""
        return self._tokenizer is not None

    def render(self, trajectory: trajectory_pb2.Trajectory) -> str:
        """Returns an episode as Markdown: each turn's prompt, response and reward."""
        lines = [f"**{trajectory.environment_tag}** · seed {trajectory.environment_seed} · score {trajectory.score:g}"]
        for turn in trajectory.turns:
            tokens = trajectory.sequences[turn.sequence].token_ids
            lines.append(f"\n*Turn {turn.index}: prompt*\n\n{self._block(tokens, turn.prompt)}")
            lines.append(f"\n*Response, reward {turn.reward:g}*\n\n{self._block(tokens, turn.response)}")
        text = "\n".join(lines)
        return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "\n… (cut)"

    def _block(self, tokens: Any, part: trajectory_pb2.TokenRange) -> str:
        """Returns decoded tokens as an indented code block: whatever the text holds, it cannot end the block."""
        text: str = self._tokenizer.decode(list(tokens[part.begin : part.end]), skip_special_tokens=False)
        return "\n".join(f"    {line}" for line in text.splitlines())


def _load_tokenizer(model_path: str) -> Any:
    """Returns the tokenizer, or None after a log line that says why there is none."""
    try:
        path = Path(policies.resolve(model_path)) / "tokenizer.json"
        from tokenizers import Tokenizer

        if path.is_file():
            return Tokenizer.from_file(str(path))
        reason = f"{path} does not exist on this host"
    except ImportError:
        reason = "the package tokenizers is not installed"
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        reason = f"the tokenizer of {model_path} cannot be read: {error}"
    _log.info("no episode texts", reason=reason)
    return None
