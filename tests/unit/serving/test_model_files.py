"""Model directories: what is wrong with one is said in one line; hashes and weight names are stable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollwire.policies import resolve
from rollwire.rpc.weight_stream import build_manifest
from rollwire.serving.config.sections import ModelSection
from rollwire.serving.model_files import load_model, load_tokenizer, model_source, template_hash, tokenizer_hash
from rollwire.serving.model_tensors import copy_all_in, held_digest, layouts, named_weights, to_host
from rollwire.serving.server import ServeError
from rollwire.v1 import weights_pb2

TINY = Path(resolve("builtin:tiny"))
CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def refused(path: Path | str, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ServeError) as caught:
        load_model(ModelSection(path=str(path)), dtype, CPU, None)
    text = str(caught.value)
    assert "\n" not in text and repr(str(path)) in text
    return text


def test_sources() -> None:
    assert model_source(ModelSection()) == str(TINY)
    assert model_source(ModelSection(path="some/model")) == "some/model"
    assert model_source(ModelSection(path="gpt2")) == "gpt2"


@pytest.mark.parametrize("path", ["./model", "../model", "/some/model", "~/model", "some/deep/model", "here/model"])
def test_a_missing_directory_is_not_looked_for_on_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ServeError, match="there is no such directory") as caught:
        model_source(ModelSection(path=path))
    assert repr(path) in str(caught.value)


def test_what_is_missing_is_named(directory: Path, tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nowhere")
    assert "no built-in policy" in refused("builtin:small")
    assert "is a file" in refused(directory / "config.json")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")
    (directory / "model.safetensors").unlink()
    assert "no weights" in refused(directory)


def test_a_broken_directory_is_one_line(directory: Path) -> None:
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:1000])
    assert "model cannot be loaded" in refused(directory)
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text('{"model_type": "nothing"}')
    assert "model cannot be loaded" in refused(directory)


def test_weights_that_lack_tensors_are_refused(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "q_proj.weight" in name)
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert f"lack 1 of the model's tensors, such as ['{name}']" in refused(directory)


def test_a_chat_template_file_replaces_the_tokenizers(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    section = ModelSection(path=str(directory), chat_template=str(template))
    assert load_tokenizer(section).chat_template == "{{ messages }}"
    for content, word in (("  \n", "empty"), (b"\xff\xfe\x80", "UTF-8")):
        if isinstance(content, bytes):
            template.write_bytes(content)
        else:
            template.write_text(content)
        with pytest.raises(ServeError, match=word):
            load_tokenizer(section)
    template.unlink()
    with pytest.raises(ServeError, match="cannot be read"):
        load_tokenizer(section)


def test_the_tokenizer_hash_is_of_its_content_alone(directory: Path) -> None:
    first = load_tokenizer(ModelSection())
    expected = tokenizer_hash(first)
    assert len(expected) == 64
    first("some text", truncation=True, max_length=3, padding="max_length")
    assert tokenizer_hash(first) == expected
    assert tokenizer_hash(load_tokenizer(ModelSection(path=str(directory)))) == expected
    content = json.loads((directory / "tokenizer.json").read_text())
    content["added_tokens"][-1]["content"] = "something else"
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_hash(load_tokenizer(ModelSection(path=str(directory)))) != expected


def test_the_template_hash_depends_on_every_text_and_its_place() -> None:
    hashes = [template_hash("a", ["b", "c"]), template_hash("a", ["c", "b"]), template_hash("ab", ["c"])]
    assert len(set(hashes)) == 3 and template_hash("a", ["b", "c"]) == hashes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_out_and_come_in_unchanged(dtype: torch.dtype) -> None:
    sender = load_model(ModelSection(), torch.float32, CPU, None)
    receiver = load_model(ModelSection(), dtype, CPU, None)
    with torch.no_grad():
        for _, tensor in named_weights(receiver):
            tensor.zero_()
    sent = {name: to_host(tensor, dtype) for name, tensor in named_weights(sender)}
    expected = layouts(receiver, dtype)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in sent.items()} == {
        name: (layout.dtype, layout.shape) for name, layout in expected.items()
    }
    # The head is tied to the embedding and listed once, under the embedding's name.
    assert "model.embed_tokens.weight" in sent and "lm_head.weight" not in sent
    copy_all_in(receiver, sent)
    version = weights_pb2.WeightVersion(lineage="main", step=0)
    assert held_digest(receiver, dtype) == build_manifest(version, sent).digest == held_digest(sender, dtype)
    assert receiver.lm_head.weight is receiver.model.embed_tokens.weight


def test_importing_the_module_loads_no_torch() -> None:
    code = "import sys, rollwire.serving.model_files; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
