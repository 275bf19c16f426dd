"""What the learner exports is a model for vLLM itself, loaded from its directory as anybody would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollwire.client.learner import LearnerClient
from rollwire.learner.service import LearnerServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import learner_pb2, trajectory_pb2

pytestmark = pytest.mark.timeout(300)
PROMPT = [(7 * position + 3) % 90 for position in range(23)]
FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)

_GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=4)
    settings = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, settings)[0].outputs
    drawn = [[token, found[token].logprob] for token, found in zip(output.token_ids, output.logprobs)]
    print("drawn", json.dumps(drawn))
"""


async def _exported(model: Path, output: Path) -> Path:
    """Trains one step that changes the weights visibly, and exports them."""
    config = RunConfig.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(model)},
            "run": {"output_dir": str(output)},
            "learner": {"optimizer": {"learning_rate": 1e-2}},
            "rollout": {"max_episode_tokens": 256},
        }
    )
    sample = learner_pb2.TrainSample(
        sample_id="one",
        token_ids=PROMPT,
        loss_mask=[False] + [True] * (len(PROMPT) - 1),
        advantages=[1.0] * len(PROMPT),
        logprobs=[-4.0] * len(PROMPT),
    )
    async with serving(LearnerServer(config), Binding(), grace_s=5) as server, LearnerClient(server.address) as client:
        header = learner_pb2.TrainHeader(base_version=(await client.get_info()).version, optimizer_steps=1, fence=FENCE)
        header.loss.clip_high = 1e9
        await client.train(header, [sample])
        return Path((await client.export(learner_pb2.ExportRequest(fence=FENCE, name="trained"))).path)


async def test_vllm_loads_an_export_and_gives_its_logprobs(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    exported = await _exported(model_directory("qwen2_tied"), tmp_path / "output")
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(exported), json.dumps(PROMPT)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("drawn ")]
    assert done.returncode == 0 and lines, f"{done.stdout}\n{done.stderr[-3000:]}"
    drawn = json.loads(lines[0].removeprefix("drawn "))
    tokens, logprobs = [token for token, _ in drawn], torch.tensor([logprob for _, logprob in drawn])
    trained, before = (_logprobs(path, tokens) for path in (exported, model_directory("qwen2_tied")))
    assert len(tokens) == 12
    assert (logprobs - trained).abs().max() < 1e-4
    assert (logprobs - before).abs().max() > 1e-2, "the step changed nothing"


def _logprobs(path: Path, drawn: list[int]) -> torch.Tensor:
    """What transformers says of tokens drawn after the prompt."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*PROMPT, *drawn]])).logits[0, len(PROMPT) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
