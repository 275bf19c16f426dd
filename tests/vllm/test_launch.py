"""`rollout.engine=vllm` through the real launcher: all processes, other architectures, and an engine that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollwire.policies import resolve
from rollwire.v1 import trajectory_pb2

# Four processes start, each loading torch; on a busy host that takes minutes.
pytestmark = pytest.mark.timeout(600)
TINY = Path(resolve("builtin:tiny"))
EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "configs" / "frozenlake-tiny.yaml"
STEPS, GROUPS, EPISODES = 2, 4, 4
SMALL = (
    f"run.max_steps={STEPS}",
    f"batch.groups_per_step={GROUPS}",
    f"batch.episodes_per_group={EPISODES}",
    "validation.episodes=0",
    "algorithm.filter_zero_variance=false",
    "rollout.engine=vllm",
    "rollout.vllm.kv_cache_mib=64",
)
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rollwire.cli.main", *map(str, arguments)]


def environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def launch(output_dir: Path, *overrides: object) -> Path:
    """Runs the example, made small, to its end and returns the directory of the run."""
    arguments = command("launch", EXAMPLE, *SMALL, f"run.output_dir={output_dir}", *overrides)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500, env=environment(), check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (path,) = (output_dir / "runs" / "frozenlake-tiny").iterdir()
    return path


def check_run(path: Path) -> None:
    """What must hold of every run: its steps and its trajectories."""
    with sqlite3.connect(path / "run.db") as ledger:
        assert ledger.execute("SELECT step, state FROM steps ORDER BY step").fetchall() == [
            (step, "committed") for step in range(STEPS)
        ]
        assert ledger.execute("SELECT COUNT(DISTINCT trajectory_id) FROM step_trajectories").fetchall() == [
            (STEPS * GROUPS * EPISODES,)
        ]
        records = [
            trajectory_pb2.Trajectory.FromString(row) for (row,) in ledger.execute("SELECT record FROM trajectories")
        ]
    for record in records:
        for sequence in record.sequences:
            spanned = [place for span in sequence.version_spans for place in range(span.range.begin, span.range.end)]
            assert spanned == [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
    assert "vllm ready" in (path / "logs" / "rollout.log").read_text()


def check_agreement(path: Path) -> None:
    """vLLM and the learner score the same tokens the same; holds where no trajectory is stale."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["actor/logprob_gap_max"] for line in lines if "actor/logprob_gap_max" in line]
    assert len(gaps) == STEPS and max(gaps) < 1e-4


def make_model(directory: Path, config: Any) -> Path:
    """Saves a random model with the tiny policy's tokenizer."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory / name)
    return directory


def test_the_tiny_policy(tmp_path: Path) -> None:
    """Generations that run during an update are kept: the learner trains while episodes are played."""
    check_run(launch(tmp_path, "max_staleness=1", "rollout.pause_mode=keep"))


def run_in_step(output_dir: Path, model: Path) -> None:
    """Runs a model so that rollout and training alternate, and checks everything."""
    path = launch(output_dir, f"model.path={model}", "rollout.max_new_tokens_per_turn=16", "max_staleness=0")
    check_run(path)
    check_agreement(path)


def test_llama_style_with_an_untied_head(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    config = transformers.LlamaConfig(
        **_COMMON,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = make_model(tmp_path / "model", config)
    run_in_step(tmp_path / "output", model)


def test_gemma_style_tied_with_a_large_vocabulary(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    config = transformers.Gemma3TextConfig(
        **_COMMON,
        vocab_size=160_000,
        sliding_window=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = make_model(tmp_path / "model", config)
    run_in_step(tmp_path / "output", model)


def test_a_server_whose_engine_dies_ends_and_says_why(tmp_path: Path) -> None:
    ready_file = tmp_path / "rollout.json"
    config = tmp_path / "run.yaml"
    config.write_text("device: cpu\nrollout: {engine: vllm, max_episode_tokens: 256, vllm: {kv_cache_mib: 16}}\n")
    arguments = command("serve", "rollout", config, "--port=0", f"--ready-file={ready_file}")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment())
    try:
        wait_for(lambda: "vllm ready" in (tmp_path / "log").read_text(), 120)
        (core,) = (pid for pid in children(server.pid) if b"EngineCore" in command_line(pid))
        os.kill(core, signal.SIGKILL)
        assert server.wait(30) == 1
    finally:
        server.kill()
        server.wait()
    errors = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "vllm's engine process has died" in errors[0]
    assert errors[0].endswith("restart the rollout server")


def wait_for(condition: Any, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
