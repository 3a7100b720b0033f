"""Does E-GRPO learn? The tiny FLUX, the target-colour reward, and the same run with advantages shuffled.

    python -m benchmarks.learning [--minutes 5] [--seeds 1]

Prints and writes ``benchmarks/results/learning.json``: the rise of the held-out reward in units of its starting
spread (standard deviation over the held-out images), for the real run and for the control.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from egrpo.backends.demo import DEMO_PROMPTS
from egrpo.backends.diffusers_flux import DiffusersFluxPolicy
from egrpo.prompts import make_prompt_set
from egrpo.rewards import RewardSet, RewardTerm
from egrpo.rewards.builtin import builtin_reward
from egrpo.schedule import flow_sigmas, plan_steps
from egrpo.trainer import Evaluation, Step, Trainer, TrainSettings

RESULTS = Path(__file__).parent / "results"
COLOUR = "#2060e0"


def train(seed: int, minutes: float, shuffled: bool) -> dict:
    """One run until its time is over; rewards at every evaluation."""
    policy = DiffusersFluxPolicy.from_demo(size=64, rank=4, alpha=4, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def shuffle(advantages: torch.Tensor) -> torch.Tensor:
        return torch.stack([row[torch.randperm(len(row), generator=generator)] for row in advantages])

    trainer = Trainer(
        policy,
        RewardSet((RewardTerm(builtin_reward("target_colour", colour=COLOUR)),)),
        make_prompt_set(DEMO_PROMPTS, held_out=8),
        plan_steps(flow_sigmas(16)),
        TrainSettings(
            iterations=100_000,
            group_size=8,
            learning_rate=2e-3,
            eval_every=10,
            eval_samples=4,
            micro_batch=16,
            seed=seed,
        ),
        advantage_transform=shuffle if shuffled else None,
    )
    began, evaluations, iterations = time.monotonic(), [], 0
    for event in trainer.events():
        if isinstance(event, Evaluation):
            scores = event.scores["target_colour"]
            evaluations.append(
                {
                    "iteration": event.iteration,
                    "seconds": time.monotonic() - began,
                    "mean": scores.mean().item(),
                    "std": scores.std().item(),
                }
            )
            print(f"  iteration {event.iteration:4d}  reward {scores.mean():.4f} +- {scores.std():.4f}", flush=True)
            if time.monotonic() - began > minutes * 60:
                break
        if isinstance(event, Step):
            iterations = event.iteration
    first, last = evaluations[0], evaluations[-1]
    return {
        "seed": seed,
        "shuffled": shuffled,
        "iterations": iterations,
        "minutes": last["seconds"] / 60,
        "rise_in_starting_stds": (last["mean"] - first["mean"]) / first["std"],
        "evaluations": evaluations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="time for each run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runs = []
    for seed in range(arguments.seeds):
        for shuffled in (False, True):
            print(f"seed {seed}, {'shuffled advantages' if shuffled else 'E-GRPO'}", flush=True)
            runs.append(train(seed, arguments.minutes, shuffled))
            print(f"  rise: {runs[-1]['rise_in_starting_stds']:+.2f} starting standard deviations", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "learning.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
