"""Makes the tiny policy: tokenizer, training, checkpoint, measurement.

    python -m tools.tiny_policy --output services/rollwire/policies/tiny

Takes about 10 minutes on one free CPU core, measurement included. The result is the same to the bit only on the same
CPU and torch build.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import torch
from tokenizers import Tokenizer

from tools.tiny_policy import model, tokenizer
from tools.tiny_policy.evaluate import Evaluator
from tools.tiny_policy.train import Settings, train
from tools.tiny_policy.transcripts import Transcriber

VALIDATION_GAMES = 512
# The success that leaves RL real work: above random legal play (0.218), far from a perfect player (1.0).
SUCCESS_RANGE = (0.25, 0.50)


def main() -> None:
    """Runs the whole recipe."""
    arguments = _parse()
    torch.set_num_threads(1)
    if not arguments.evaluate_only:
        _make(arguments.output, Settings(seed=arguments.seed))
    success = _measure(arguments.output)
    if not SUCCESS_RANGE[0] <= success <= SUCCESS_RANGE[1]:
        raise SystemExit(f"success at temperature 1 is {success:.3f}; allowed: {SUCCESS_RANGE}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_policy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="seed of initialisation and games")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the checkpoint that is there")
    return parser.parse_args()


def _make(directory: pathlib.Path, settings: Settings) -> None:
    tokenizer.save(directory)
    encoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    torch.manual_seed(settings.seed)
    policy = model.create(
        vocabulary_size=encoder.get_vocab_size(),
        end_id=encoder.encode("<|im_end|>").ids[0],
        pad_id=encoder.encode("<|endoftext|>").ids[0],
    )
    print(f"{sum(weight.numel() for weight in policy.parameters()):,} parameters; {dataclasses.asdict(settings)}")
    train(policy, Transcriber(encoder), settings, lambda line: print(line, flush=True))
    model.save(policy, directory)


def _measure(directory: pathlib.Path) -> float:
    """Prints the scores on the first validation lakes and returns the success at temperature 1."""
    evaluator = Evaluator(directory)
    seeds = list(range(VALIDATION_GAMES))
    greedy = evaluator.score(seeds, temperature=0.0)
    sampled = [evaluator.score(seeds, temperature=1.0, sampling_seed=seed) for seed in range(3)]
    print(f"greedy        {greedy}")
    for seed, score in enumerate(sampled):
        print(f"temperature 1 {score} (sampling seed {seed})")
    return sum(score.success for score in sampled) / len(sampled)


if __name__ == "__main__":
    main()
