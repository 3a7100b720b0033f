"""Does a rising reward mean better pictures? E-GRPO on the demo family's CLIP, judged by the oracle.

    python -m benchmarks.demo_training [--minutes 12] [--seeds 3]

Trains the RL base on the tiny CLIP reward alone and reads held-out pictures back with the exact judge, before and after:
64 prompts whose combinations nothing was trained on, 4 images each, the same noise. Prints and writes
``benchmarks/results/demo_training.json`` (every attribute, mean and range over seeds) and a before/after grid.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from egrpo.backends import demo, oracle
from egrpo.backends.diffusers_flux import DiffusersFluxPolicy
from egrpo.backends.shapes import caption, sample_scenes
from egrpo.evaluation import Evaluation, evaluate_policy
from egrpo.prompts import PromptSet
from egrpo.rewards import RewardSet, RewardTerm
from egrpo.rewards.demo import DemoClip, judged
from egrpo.run import comparison_grid
from egrpo.schedule import GROUPINGS, flow_sigmas, plan_steps
from egrpo.trainer import Started, Step, Trainer, TrainSettings

RESULTS = Path(__file__).parent / "results"
JUDGED = [caption(scene) for scene in sample_scenes(64, seed=3, held_out=True)]
SAMPLES = 4


def train(seed: int, minutes: float, arguments: argparse.Namespace) -> dict:
    """One run; the oracle's summary before and after."""
    policy = DiffusersFluxPolicy.from_demo(rank=arguments.rank, alpha=arguments.rank, seed=seed)
    rewards = RewardSet((RewardTerm(DemoClip()),))
    plan = plan_steps(flow_sigmas(16), grouping=arguments.grouping)
    trainer = Trainer(
        policy,
        rewards,
        PromptSet(demo.TRAIN_PROMPTS, demo.HELD_OUT_PROMPTS, "demo"),
        plan,
        TrainSettings(
            iterations=100_000,
            prompts_per_iteration=arguments.prompts,
            group_size=8,
            learning_rate=arguments.lr,
            update_every=arguments.update_every,
            kl_beta=arguments.kl,
            eval_every=0,
            micro_batch=32,
            seed=seed,
        ),
    )
    conditions = policy.encode(JUDGED)

    def evaluate(iteration: int) -> Evaluation:
        return evaluate_policy(
            policy, rewards, JUDGED, conditions, plan, samples=SAMPLES, seed=1000, micro_batch=4, iteration=iteration
        )

    before = evaluate(0)
    began = last = time.monotonic()
    curve: list[tuple[float, float]] = []
    for event in trainer.events():
        if isinstance(event, Started):
            began = time.monotonic()
        if isinstance(event, Step):
            spent = (time.monotonic() - began) / 60
            curve.append((round(spent, 3), round(event.metrics["reward"], 4)))
            if time.monotonic() - last > 30:
                last = time.monotonic()
                recent = [reward for _, reward in curve[-10:]]
                mean = sum(recent) / len(recent)
                print(f"  {spent:5.1f} min, iteration {event.iteration:4d}: CLIP {mean:.3f} in training", flush=True)
            if spent >= minutes:
                break
    after = evaluate(trainer.iteration)
    if seed == 0:
        RESULTS.mkdir(exist_ok=True)
        comparison_grid(_shown(before), _shown(after)).save(RESULTS / "demo_before_after.png")
    result = {"seed": seed, "minutes": minutes, "iterations": trainer.iteration, "curve": curve}
    for name, evaluation in (("before", before), ("after", after)):
        prompts = [prompt for prompt in evaluation.prompts for _ in range(evaluation.samples)]
        result[name] = oracle.summary(judged(evaluation.images, prompts))
        result[name]["clip"] = evaluation.scores["demo_clip"].mean().item()
    return result


def _shown(evaluation: Evaluation, prompts: int = 8) -> Evaluation:
    """The first prompts only, for a picture."""
    count = prompts * evaluation.samples
    scores = {name: values[:count] for name, values in evaluation.scores.items()}
    return Evaluation(
        evaluation.iteration, evaluation.prompts[:prompts], evaluation.images[:count], scores, evaluation.reward
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0, help="training time of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--grouping", choices=GROUPINGS, default="disjoint")
    parser.add_argument("--update-every", type=int, default=1)
    parser.add_argument("--kl", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "demo_training.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runs = []
    for seed in arguments.seeds:
        print(f"seed {seed}", flush=True)
        runs.append(train(seed, arguments.minutes, arguments))
        print(f"  {'':12s} {'before':>7s} {'after':>7s} {'change':>7s}")
        for name, value in runs[-1]["before"].items():
            after = runs[-1]["after"][name]
            print(f"  {name:12s} {value:7.3f} {after:7.3f} {after - value:+7.3f}", flush=True)
    print("change over seeds: mean (range)")
    for name in runs[0]["before"]:
        changes = [run["after"][name] - run["before"][name] for run in runs]
        print(f"  {name:12s} {sum(changes) / len(changes):+.3f} ({min(changes):+.3f} to {max(changes):+.3f})")
    arguments.output.parent.mkdir(exist_ok=True)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    arguments.output.write_text(json.dumps({"settings": settings | {"output": None}, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
