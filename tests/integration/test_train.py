"""`rollwire train` against servers that were started by hand, and other models than the built-in one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollwire.policies import resolve

from .conftest import EXAMPLE, SMALL, command, environment, finished_run, rollwire


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Three servers started by hand, as in three terminals; yields their addresses."""
    processes, addresses = [], {}
    try:
        for kind in ("environment", "rollout", "learner"):
            ready = tmp_path / f"{kind}.json"
            log = (tmp_path / f"{kind}.log").open("w")
            arguments = command("serve", kind, EXAMPLE, *SMALL, "--ready-file", ready)
            processes.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=environment()))
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert processes[-1].poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
                time.sleep(0.05)
            addresses[kind] = json.loads(ready.read_text())["address"]
        yield addresses
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(30) for process in processes]
    assert codes == [0, 0, 0]


def test_train_drives_servers_started_by_hand(servers: dict[str, str], tmp_path: Path) -> None:
    addresses = [f"services.{kind}=[{address}]" for kind, address in servers.items()]
    other = rollwire("train", EXAMPLE, *SMALL, f"run.output_dir={tmp_path}", *addresses, "run.max_steps=2")
    assert other.returncode == 1
    assert f"run.max_steps is 2 in this run's configuration, but the learner at {servers['learner']}" in other.stderr
    assert "rollout server" not in other.stderr  # nothing that it acts on differs

    run = finished_run("train", tmp_path / "output", *addresses)
    assert run.query("SELECT COUNT(*) FROM steps WHERE state = 'committed'") == [(3,)]


def _llama(vocabulary: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _gpt2(vocabulary: int) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_embd=48, n_layer=2, n_head=4, n_positions=1024))


@pytest.mark.parametrize("make", [_llama, _gpt2])
def test_another_architecture_trains_from_its_directory(make, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:tiny"))
    torch.manual_seed(0)
    model = make(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run = finished_run(
        "launch",
        tmp_path / "output",
        f"model.path={tmp_path / 'model'}",
        "run.max_steps=2",
        "algorithm.advantage=reinforce",
        "algorithm.filter_zero_variance=false",
    )
    digests = [digest for (digest,) in run.query("SELECT digest FROM versions ORDER BY step")]
    assert len(set(digests)) == 3
    gaps = [
        json.loads(line).get("actor/logprob_gap_max", 0.0)
        for line in (run.path / "metrics.jsonl").read_text().splitlines()
    ]
    assert 0 < max(gaps) < 1e-4


def test_a_model_without_chat_template_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("builtin:tiny"), model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    done = rollwire("launch", EXAMPLE, f"model.path={model}", f"run.output_dir={tmp_path / 'output'}")
    assert done.returncode == 1
    assert "chat template" in done.stderr and "model.chat_template" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_killed_server_ends_the_run_with_its_name_and_leaves_no_orphan(tmp_path: Path) -> None:
    arguments = command("launch", EXAMPLE, f"run.output_dir={tmp_path}")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("validation"):
                break
        children = _children(process.pid)
        victim = next(pid for pid, text in children.items() if "serve learner" in text)
        os.kill(victim, signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert "learner" in errors and "Traceback" not in errors, output + errors
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children(parent: int) -> dict[int, str]:
    """Returns command lines of the direct children of a process, by id."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}
