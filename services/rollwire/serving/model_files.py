"""The policy's files, read the same way by learner and rollout servers: model, tokenizer, chat template, hashes.

Everything that can be wrong with a model directory is found here and becomes a one-line `ServeError`. Importing this
module loads neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollwire.policies import BUILTIN_PREFIX, resolve
from rollwire.serving.config.sections import ModelSection
from rollwire.serving.server import ServeError

if TYPE_CHECKING:
    import torch

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHT_FILES: Final = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_SHOWN_NAMES: Final = 3


def model_source(section: ModelSection) -> str:
    """Returns what `from_pretrained` is given: an existing model directory, or a hub id.

    Raises:
        ServeError: The built-in policy, the directory or a file in it does not exist.
    """
    try:
        source = resolve(section.path)
    except ValueError as error:
        raise ServeError(f"model.path is {section.path!r}: {error}") from error
    directory = Path(source)
    if not directory.exists():
        # Where the first part is a directory here, a path is meant; asking the hub for it would take a minute.
        local = directory.parent != Path() and directory.parent.is_dir()
        if isinstance(source, str) and _HUB_ID.fullmatch(source) is not None and not local:
            return source
        raise ServeError(
            f"model.path is {section.path!r}: there is no such directory; allowed: builtin:tiny, a directory in "
            "Hugging Face layout, or a hub id such as org/name"
        )
    if not directory.is_dir():
        raise ServeError(f"model.path is {section.path!r}, which is a file; give the directory that holds config.json")
    if not (directory / "config.json").is_file():
        raise ServeError(
            f"model.path is {section.path!r}: the directory holds no config.json; give a directory in Hugging Face "
            "layout, as save_pretrained writes it"
        )
    if not any(found for pattern in _WEIGHT_FILES for found in directory.glob(pattern)):
        raise ServeError(
            f"model.path is {section.path!r}: the directory holds no weights (*.safetensors); copy them there, or "
            "give another directory"
        )
    return str(source)


def load_model(section: ModelSection, dtype: torch.dtype, device: torch.device, attention: str | None) -> Any:
    """Loads the causal language model in evaluation mode.

    Args:
        section: Which model.
        dtype: Element type of its parameters.
        device: Where it goes.
        attention: Attention implementation of transformers; None lets transformers choose for this architecture.

    Returns:
        A `transformers.PreTrainedModel` whose every parameter came from the checkpoint.

    Raises:
        ServeError: The directory is broken, or the hub id cannot be loaded.
    """
    source = model_source(section)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=attention, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises a dozen types for a broken directory
        raise ServeError(_load_failure(section, "model", error)) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ServeError(
            f"model.path is {section.path!r}: the weights lack {len(missing)} of the model's tensors, such as "
            f"{missing[:_SHOWN_NAMES]}; config.json and weights do not belong together"
        )
    return model.to(device).eval()


def load_tokenizer(section: ModelSection) -> Any:
    """Loads the tokenizer with its chat template.

    Returns:
        A `transformers.PreTrainedTokenizerBase` whose `chat_template` is one Jinja text.

    Raises:
        ServeError: There is no usable tokenizer or no chat template.
    """
    source = model_source(section)
    if not _has_tokenizer(source):
        raise ServeError(
            f"model.path is {section.path!r}: the directory holds no tokenizer; copy tokenizer.json and "
            "tokenizer_config.json there"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # see load_model
        raise ServeError(_load_failure(section, "tokenizer", error)) from error
    if section.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(section.chat_template))
    if not tokenizer.chat_template:
        raise ServeError(
            f"model.path is {section.path!r}: its tokenizer has no chat template; set model.chat_template=FILE "
            "to a file with a Jinja chat template"
        )
    tokenizer.chat_template = tokenizer.get_chat_template()
    return tokenizer


def find_tokenizer(section: ModelSection) -> Any | None:
    """Loads the tokenizer as it is, with or without a chat template; None when the model comes without one."""
    source = model_source(section)
    if not _has_tokenizer(source):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception:  # a learner trains token ids; it only passes the tokenizer on
        return None


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns SHA-256 (hex) of the tokenizer's canonical JSON: sorted keys, no truncation or padding settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        content: dict[str, Any] = json.loads(backend.to_str())
        for setting_of_last_call in ("truncation", "padding"):
            content.pop(setting_of_last_call, None)
    else:
        added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        content = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added}
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def template_hash(chat_template: str, prompt_texts: Iterable[str]) -> str:
    """Returns SHA-256 (hex) of the chat template and the prompt templates, in the order given."""
    canonical = json.dumps([chat_template, *prompt_texts], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _has_tokenizer(source: str) -> bool:
    """Tells whether there are tokenizer files; without any, transformers 5 makes up an empty tokenizer."""
    directory = Path(source)
    return not directory.is_dir() or any(found for pattern in _TOKENIZER_FILES for found in directory.glob(pattern))


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ServeError(
            f"model.chat_template is {str(path)!r}, which cannot be read ({reason}); give a file with a Jinja template"
        ) from error
    if not text.strip():
        raise ServeError(f"model.chat_template is {str(path)!r}, which is empty; give a file with a Jinja template")
    return text


def _load_failure(section: ModelSection, what: str, error: Exception) -> str:
    """Says in one line why transformers could not load something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    local = section.path.startswith(BUILTIN_PREFIX) or Path(section.path).is_dir()
    place = "" if local else "there is no such directory, and as a hub id "
    return (
        f"model.path is {section.path!r}: {place}its {what} cannot be loaded ({cause[:300]}); give a directory in "
        "Hugging Face layout, builtin:tiny, or a hub id that this host can reach"
    )
