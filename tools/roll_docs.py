"""Writes the table of keys without a counterpart in docs/from-roll.md: `python tools/roll_docs.py`.

A test keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.rollout import VLLM_IGNORED
from rollwire.cli.import_roll.rules import RULES
from rollwire.cli.import_roll.sharding import FSDP_IGNORED, MEGATRON_IGNORED

TARGET = Path(__file__).resolve().parent.parent / "docs" / "from-roll.md"

_BEGIN = "<!-- written by tools/roll_docs.py -->\n"
_END = "<!-- end -->\n"
_WORDS = {Fate.DEAD: "dead", Fate.IGNORED: "ignored", Fate.UNSUPPORTED: "unsupported"}
_STRATEGY = "strategy_args.strategy_config"


def rows() -> Iterator[tuple[str, str, str]]:
    """Yields key or pattern, fate and why."""
    for rule in RULES:
        values = ", ".join(f"`{value}`" for value in rule.neutral if value not in (None, {}))
        yield rule.pattern, _WORDS[rule.fate] + (f", but {values} asks for nothing" if values else ""), rule.why
    for worker, table in (("actor_infer", VLLM_IGNORED), ("actor_train", {**FSDP_IGNORED, **MEGATRON_IGNORED})):
        for name, why in table.items():
            yield f"{worker}.{_STRATEGY}.{name}", _WORDS[Fate.IGNORED], why


def render(page: str) -> str:
    """Returns the page with the table as it is now."""
    head, _, rest = page.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    table = ["| Key of ROLL | Fate | Why |", "|---|---|---|"]
    table += [f"| `{key}` | {fate} | {why} |" for key, fate, why in rows()]
    return f"{head}{_BEGIN}\n" + "\n".join(table) + f"\n\n{_END}{tail}"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
