"""A model directory without a tokenizer: transformers 5 would make up an empty one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollwire.policies import resolve
from rollwire.serving.config.sections import ModelSection
from rollwire.serving.model_files import find_tokenizer, load_tokenizer
from rollwire.serving.server import ServeError


@pytest.fixture
def section(tmp_path: Path) -> ModelSection:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(resolve("builtin:tiny")) / name, tmp_path)
    return ModelSection(path=str(tmp_path))


def test_none_is_found(section: ModelSection) -> None:
    assert find_tokenizer(section) is None


def test_loading_one_is_an_error_that_says_what_is_missing(section: ModelSection) -> None:
    with pytest.raises(ServeError, match="holds no tokenizer"):
        load_tokenizer(section)
