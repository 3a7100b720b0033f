"""The command line: ``python -m egrpo train | resume | eval | score | plan | plot``.

Exit status: 0 done, 1 failed while running, 2 bad input (one line says what), 130 stopped by Ctrl-C with the run saved.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Sequence

import torch
from torch import Tensor

from .evaluation import Evaluation, evaluate_policy, evaluation_rows, evaluation_table
from .lora import TARGET_CHOICES, check_rank
from .objective import RATIOS
from .policy import Policy, check_size
from .prompts import PromptSet, make_prompt_set, read_prompt_file
from .rewards import Reward, RewardError, RewardSet, RewardTerm
from .rewards.builtin import BUILTIN_REWARDS, builtin_reward
from .rewards.demo import DEMO_REWARDS, demo_reward, demo_reward_set
from .run import (
    Run,
    checked_name,
    comparison_grid,
    describe_cost,
    duration,
    execute,
    lora_metadata,
    report,
    write_text,
)
from .schedule import ACTIVE_CHOICES, GROUPINGS, Plan, flow_sigmas, parse_merges, plan_steps
from .sde import KERNELS
from .trainer import Started, Step, Trainer, TrainSettings, Warned

if TYPE_CHECKING:
    from .backends.diffusers_flux import DiffusersFluxPolicy

logger = logging.getLogger(__name__)

BAD_INPUT, FAILED, STOPPED = 2, 1, 130

DEFAULTS: dict[str, Any] = {
    "steps": 16,
    "shift": 3.0,
    "eta": 0.7,
    "tau": 2.2,
    "active": "first_half",
    "grouping": "overlapping",
    "kernel": "flow_sde",
    "colour": "#2060e0",
    "target": 0.5,
    "held_out": 4,
    "targets": "attention+mlp",
    "guidance": 3.5,
    "name": "egrpo",
    "output": "runs",
}
DEFAULT_REWARD = ["target_colour"]
MODEL_DEFAULTS: dict[str, Any] = {"size": "512x512", "rank": 16, "dtype": "bf16"}
DEMO_DEFAULTS: dict[str, Any] = {
    "size": "64x64",
    "rank": 8,
    "learning_rate": 2e-3,
    "iterations": 30,
    "prompts_per_iteration": 4,
    "update_every": 1,
    "grouping": "disjoint",
    "held_out": 16,
    "eval_every": 5,
    "eval_samples": 2,
    "micro_batch": 32,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


class InputError(ValueError):
    """Bad arguments or files; the message is shown as it is."""


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line, without the usage text above it."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        options = _parser().parse_args(arguments)
        return options.command(vars(options))
    except (ValueError, OSError) as error:
        # What reads input raises these; _drive turns those of a run under way into _RunFailed.
        return _failed(error, BAD_INPUT)
    except _RunFailed as error:
        return _failed(error, FAILED)
    except KeyboardInterrupt:
        return STOPPED


def _failed(error: Exception, status: int) -> int:
    print(f"egrpo: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return status


class _RunFailed(RuntimeError):
    """A run that ended early for a reason that the message explains; its state is saved."""


# --- arguments -------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="egrpo",
        description="E-GRPO: align FLUX LoRAs to reward models (arXiv 2601.00423).",
        epilog="egrpo COMMAND --help tells the options of a command.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, run: Callable[[dict], int], text: str, **more: Any) -> argparse.ArgumentParser:
        # Options that are not given stay absent, so that a config file and the defaults can fill them in.
        added = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, argument_default=argparse.SUPPRESS, **more
        )
        added.set_defaults(command=run)
        return added

    _add_training_options(command("train", train, "Train a LoRA and write a run folder."))

    resume_parser = command("resume", resume, "Continue a run from its newest checkpoint.")
    resume_parser.add_argument("run", type=Path, help="run folder")
    resume_parser.add_argument("--iterations", type=int, metavar="N", help="train to this iteration in all")
    resume_parser.add_argument("--device", help="torch device (default: cuda if there is one)")
    resume_parser.add_argument("--dry-run", action="store_true", help="check, show the plan, and stop")

    eval_parser = command("eval", evaluate, "Compare held-out prompts without and with a LoRA, from the same noise.")
    eval_parser.add_argument("lora", type=Path, help="run folder, or a LoRA file (then with --demo or --model)")
    _add_model_options(eval_parser)
    _add_prompt_options(eval_parser)
    _add_reward_options(eval_parser)
    _add_schedule_options(eval_parser)
    _add_number(eval_parser, "--eval-samples", int, "images per held-out prompt (4)")
    _add_number(eval_parser, "--seed", int, "of the noise (0)")
    eval_parser.add_argument("--output", type=Path, metavar="DIR", help="where to write pictures and the table (.)")

    score_parser = command("score", score, "Score image files.")
    score_parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image files or folders of them")
    score_parser.add_argument("--prompt", help="prompt of all images, for rewards that read it")
    score_parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt per image, in order")
    _add_reward_options(score_parser)
    score_parser.add_argument("--json", action="store_true", help="one JSON object per image")

    plan_parser = command("plan", show_plan, "Show which steps are trained, how they merge, and what that costs.")
    _add_schedule_options(plan_parser)
    _add_plan_options(plan_parser)
    _add_number(plan_parser, "--group-size", int, "for the cost (8)")
    plan_parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it, as a PNG")
    plan_parser.add_argument("--json", action="store_true", help="print the plan as JSON")

    plot_parser = command("plot", plot, "Draw the curves of a run.")
    plot_parser.add_argument("run", type=Path, help="run folder or metrics.jsonl")
    plot_parser.add_argument("--output", type=Path, metavar="FILE", help="PNG to write (curves.png beside the metrics)")
    return parser


def _add_number(parser: Any, flag: str, kind: type, text: str, dest: str | None = None) -> None:
    dest = dest or flag.strip("-").replace("-", "_")
    parser.add_argument(flag, dest=dest, type=kind, metavar="N" if kind is int else "X", help=text)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or JSON of these options; flags override it")
    _add_model_options(parser)
    _add_prompt_options(parser)
    _add_reward_options(parser)
    _add_schedule_options(parser)
    _add_plan_options(parser)
    lora = parser.add_argument_group("LoRA")
    _add_number(lora, "--rank", int, "rank (16; demo 8)")
    _add_number(lora, "--alpha", float, "alpha (equal to the rank)")
    lora.add_argument(
        "--targets", metavar="T", help=f"{', '.join(TARGET_CHOICES)}, or a regular expression ({DEFAULTS['targets']})"
    )
    training = parser.add_argument_group("training")
    _add_number(training, "--iterations", int, "rollout and update rounds (100; demo 30)")
    _add_number(training, "--prompts-per-iteration", int, "prompts per round (1; demo 4)")
    _add_number(training, "--group-size", int, "images per active step that are compared (8)")
    _add_number(training, "--lr", float, "AdamW learning rate (1e-4; demo 2e-3)", dest="learning_rate")
    _add_number(training, "--weight-decay", float, "AdamW weight decay (1e-4)")
    _add_number(training, "--max-grad-norm", float, "gradient clipping (1)")
    _add_number(training, "--clip-range", float, "ratio clipping; acts from the second inner update (1e-4)")
    _add_number(training, "--kl-beta", float, "weight of the KL to the base model (0)")
    training.add_argument("--ratio", choices=RATIOS, help=f"importance ratio ({RATIOS[0]})")
    _add_number(training, "--inner-updates", int, "passes over the same rollouts (1)")
    _add_number(training, "--update-every", int, "prompts per optimizer step; 0 steps after every active step (0)")
    _add_number(training, "--ema", float, "decay of the LoRA's moving average (0 = off)", dest="ema_decay")
    _add_number(training, "--eval-every", int, "iterations between evaluations; 0 = before and after only (10)")
    _add_number(training, "--eval-samples", int, "images per held-out prompt (1; demo 2)")
    _add_number(training, "--checkpoint-every", int, "iterations between checkpoints; 0 = at the end only (50)")
    _add_number(training, "--micro-batch", int, "latents per model call; 0 chooses (0; demo 32)")
    _add_number(training, "--seed", int, "repeats a run (0)")
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="DIR", help="where run folders are made (runs)")
    output.add_argument("--name", help="name of the run; a number is appended (egrpo)")
    output.add_argument("--dry-run", action="store_true", help="check everything but the weights, show the plan, stop")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--demo", action="store_true", help="the demo family: a tiny FLUX, made on first use")
    which.add_argument("--model", metavar="FOLDER", help="FLUX.1 in diffusers' folder layout")
    model.add_argument("--size", metavar="N|WxH", help="pixels, multiples of 16 (512; demo 64)")
    _add_number(model, "--guidance", float, "FLUX guidance (3.5)")
    model.add_argument("--dtype", choices=sorted(DTYPES), help="of the frozen model (bf16); the demo is always fp32")
    model.add_argument("--device", help="torch device (default: cuda if there is one)")
    _add_number(model, "--threads", int, "CPU threads (torch's own choice; demo 1)")


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompts", metavar="FILE", help=".txt, .jsonl, .json or .csv (--demo has its own)")
    _add_number(prompts, "--held-out", int, "prompts kept for evaluation (4)")


def _add_reward_options(parser: argparse.ArgumentParser) -> None:
    rewards = parser.add_argument_group("rewards")
    rewards.add_argument(
        "--reward",
        action="append",
        metavar="KIND",
        help=f"{', '.join((*BUILTIN_REWARDS, *DEMO_REWARDS))}; may be repeated, and weighted as KIND=2 or watched as "
        f"KIND=watch ({DEFAULT_REWARD[0]}; demo: demo_clip, and demo_oracle watched)",
    )
    rewards.add_argument("--colour", metavar="#RRGGBB", help=f"of target_colour ({DEFAULTS['colour']})")
    _add_number(rewards, "--target", float, "of target_brightness and target_contrast (0.5)")


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    schedule = parser.add_argument_group("schedule")
    _add_number(schedule, "--steps", int, "denoising steps (16)")
    _add_number(schedule, "--shift", float, "time shift (3)")


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group("plan")
    _add_number(plan, "--eta", float, "noise scale (0.7)")
    _add_number(plan, "--tau", float, "entropy threshold; 0 merges nothing (2.2)")
    plan.add_argument("--active", metavar="A", help=f"{', '.join(ACTIVE_CHOICES)}, or indices 0,1,4 (first_half)")
    plan.add_argument("--grouping", choices=GROUPINGS, help=f"({DEFAULTS['grouping']})")
    plan.add_argument("--merge", metavar="M", help="one length for all steps, or step:length pairs '0:1 2:3'")
    plan.add_argument("--kernel", choices=sorted(KERNELS), help=f"({DEFAULTS['kernel']})")


def _with_defaults(given: dict) -> dict:
    """Options in full: the defaults (the model's kind has its own), then what was given."""
    own = DEMO_DEFAULTS if given.get("demo") else MODEL_DEFAULTS
    return {**DEFAULTS, **own, **given}


def _read_config(path: Path) -> dict:
    """Options of a YAML or JSON file, checked by the same rules as flags.

    Raises:
        InputError: missing or broken file, an unknown option, a bad value; names the file.
    """
    if path.suffix.lower() not in CONFIG_SUFFIXES:
        raise InputError(f"{path.name}: config files end in {', '.join(CONFIG_SUFFIXES)}")
    if not path.is_file():
        raise InputError(f"config file {path} does not exist")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            values = json.loads(text)
        else:
            import yaml

            try:
                values = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from None
    except ValueError as error:
        raise InputError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path.name} must map options to values, such as 'iterations: 50'")
    flags = []
    for key, value in values.items():
        flag = "--" + str(key).replace("_", "-")
        flag = {"--learning-rate": "--lr", "--ema-decay": "--ema"}.get(flag, flag)
        if flag == "--config":
            raise InputError(f"{path.name}: a config file cannot name another")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            for item in value if isinstance(value, list) else [value]:
                flags.append(f"{flag}={item}")
    try:
        return _plain_options(vars(_parser().parse_args(["train", *flags])))
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None


def _plain_options(options: dict) -> dict:
    """What belongs into a run's files: everything but how the command was called."""
    return {k: v for k, v in options.items() if k not in ("command", "config", "dry_run")}


# --- what the options describe ---------------------------------------------------------------------------------------


def _settings(options: dict) -> TrainSettings:
    settings = TrainSettings(**{k: options[k] for k in TrainSettings.__dataclass_fields__ if k in options})
    settings.check()
    return settings


def _plan(options: dict) -> Plan:
    merge: int | dict[int, int] | None = None
    if options.get("merge"):
        text = str(options["merge"])
        merge = int(text) if text.strip().isdigit() else parse_merges(text)
    return plan_steps(
        flow_sigmas(options["steps"], options["shift"]),
        options["eta"],
        options["tau"],
        options["active"],
        options["grouping"],
        merge=merge,
        kernel=options["kernel"],
    )


def _prompts(options: dict) -> PromptSet:
    if "prompts" in options:
        path = Path(options["prompts"])
        if not path.is_file():
            raise InputError(f"prompt file {path} does not exist")
        return make_prompt_set(read_prompt_file(path), held_out=options["held_out"], source=path.name)
    if not options.get("demo"):
        raise InputError(
            "--model needs prompts: give --prompts FILE (.txt with one prompt a line, .jsonl, .json, .csv)"
        )
    from .backends.demo import DEMO_PROMPTS

    return make_prompt_set(DEMO_PROMPTS, held_out=options["held_out"], source="demo prompts")


def _rewards(options: dict) -> RewardSet:
    if options.get("demo") and "reward" not in options:
        return demo_reward_set()
    terms = []
    for text in options.get("reward", DEFAULT_REWARD):
        kind, _, weight = text.partition("=")
        watch = weight == "watch"
        try:
            terms.append(RewardTerm(_reward(kind, options), 1.0 if watch else float(weight or 1.0), watch))
        except ValueError as error:
            raise InputError(f"--reward {text}: {error}; write KIND, KIND=WEIGHT or KIND=watch") from None
    return RewardSet(tuple(terms))


def _reward(kind: str, options: dict) -> Reward:
    if kind in DEMO_REWARDS:
        return demo_reward(kind)
    return builtin_reward(kind, colour=options["colour"], target=options["target"])


def _size(options: dict) -> tuple[int, int]:
    parts = str(options["size"]).lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise InputError(f"--size {options['size']} is neither one number nor WIDTHxHEIGHT, for example 512 or 768x512")
    width, height = int(parts[0]), int(parts[-1])
    check_size(width, height)
    return width, height


def _check_model(options: dict) -> None:
    """Raise ValueError for a model, size or LoRA that cannot be used; reads no weights."""
    from .backends.demo import FLUX_CONFIG
    from .backends.diffusers_flux import check_targets, transformer_config

    if not options.get("demo") and not options.get("model"):
        raise InputError("which model? give --demo, or --model FOLDER with FLUX.1 in diffusers' layout")
    _size(options)
    if options.get("threads", 1) < 1:
        raise InputError(f"--threads is {options['threads']}; it must be at least 1")
    check_rank(options["rank"], options.get("alpha", 1.0))
    config = FLUX_CONFIG if options.get("demo") else transformer_config(Path(options["model"]))
    check_targets(config, options["targets"])


def _policy(options: dict) -> DiffusersFluxPolicy:
    from .backends.diffusers_flux import DiffusersFluxPolicy

    width, height = _size(options)
    if "threads" in options:
        torch.set_num_threads(options["threads"])
    shared = {key: options[key] for key in ("rank", "targets", "guidance")}
    shared |= {"alpha": options.get("alpha", float(options["rank"])), "seed": options.get("seed", 0)}
    shared["device"] = options.get("device")
    if options.get("demo"):
        return DiffusersFluxPolicy.from_demo((width, height), **shared)
    return DiffusersFluxPolicy.from_pretrained(
        Path(options["model"]), width=width, height=height, dtype=DTYPES[options["dtype"]], **shared
    )


# --- train and resume ------------------------------------------------------------------------------------------------


def train(given: dict) -> int:
    """``egrpo train``"""
    config = _read_config(given["config"]) if "config" in given else {}
    explicit = _plain_options(given)
    if "demo" in explicit or "model" in explicit:
        config = {key: value for key, value in config.items() if key not in ("demo", "model")}
    options = _with_defaults(config | explicit)
    _check_model(options)
    checked_name(options["name"])
    return _train(options, _plan(options), _prompts(options), None, given.get("dry_run", False))


def resume(given: dict) -> int:
    """``egrpo resume``"""
    run = Run.open(given["run"])
    config = run.config
    if "options" not in config:
        raise InputError(f"{run.name} was not made by egrpo train and cannot be continued from here")
    options = config["options"] | {key: given[key] for key in ("iterations", "device") if key in given}
    prompts = PromptSet(
        *(tuple(config["prompts"][part]) for part in ("train", "held_out")), config["prompts"]["source"]
    )
    _check_model(options)
    return _train(options, Plan.from_dict(config["plan"]), prompts, run, given.get("dry_run", False))


def _train(options: dict, plan: Plan, prompts: PromptSet, run: Run | None, dry_run: bool) -> int:
    """The one path of a new run (``run`` is None) and a continued one."""
    settings, rewards = _settings(options), _rewards(options)
    state = run.load_checkpoint() if run else None
    if state and state.iteration >= settings.iterations:
        raise InputError(f"{run.name} has reached its {state.iteration} iterations: give --iterations above that")
    print(plan.table(settings.group_size))
    print(f"prompts: {len(prompts.train)} to train on, {len(prompts.held_out)} held out ({prompts.source})")
    if dry_run:
        forward, backward = plan.evaluations(settings.group_size)
        left = (settings.iterations - (state.iteration if state else 0)) * settings.prompts_per_iteration
        print(
            f"dry run: {left * forward} model evaluations and {left * backward * settings.inner_updates} with gradient"
        )
        return 0

    policy = _policy(options)
    trainer = Trainer(policy, rewards, prompts, plan, settings)
    config = {
        "settings": asdict(settings),
        "name": options["name"],
        "plan": plan.to_dict(),
        "rewards": rewards.settings(),
        "prompts": {"train": list(prompts.train), "held_out": list(prompts.held_out), "source": prompts.source},
        "options": options,
    }
    if run is None:
        run = Run.create(Path(options["output"]), options["name"], config)
    else:
        trainer.load_state(state)
        run.rewind(state.iteration)
        write_text(run.folder / "config.json", json.dumps(config, indent=2))
        print(f"continuing {run.name} from iteration {state.iteration}")
    return _drive(trainer, run, options)


def _drive(trainer: Trainer, run: Run, options: dict) -> int:
    """Run a trainer to its end with its progress on the terminal, then write the pictures and the report."""
    from .plots import plot_training, sparkline

    print(f"run folder: {run.folder}", flush=True)
    first = trainer.iteration
    lora = {key: options.get(key) for key in ("rank", "alpha", "targets", "size", "guidance")}

    def stopped() -> str:
        text = f"stopped at iteration {trainer.iteration}"
        return f"{text}; continue with: python -m egrpo resume {run.folder}" if run.checkpoints() else text

    try:
        outcome = execute(trainer, run, lora_metadata(trainer, {"lora": lora}), _Narrator())
        # A continued run has not seen its own start; the base model has not moved since.
        before = outcome.before if first == 0 else _base_evaluation(trainer)
    except KeyboardInterrupt:
        print(stopped(), file=sys.stderr)
        raise
    except (RuntimeError, ValueError, ArithmeticError, OSError) as error:  # out of memory, NaN, a reward, a full disk
        logger.debug("the run failed", exc_info=True)
        raise _RunFailed(f"{error} ({stopped()})") from error
    run.save_image("curves.png", plot_training(run.history))
    run.save_image("before_after.png", comparison_grid(before, outcome.after))
    outcome.before = before
    text = report(outcome, run)
    (run.folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    rewards = [row["reward"] for row in run.history if "reward" in row]
    print(f"reward {sparkline(rewards)}")
    print(text)
    print(f"LoRA: {run.folder / 'lora.safetensors'}")
    print(f"pictures: {run.folder / 'images'} (curves.png, before_after.png)")
    return 0


def _base_evaluation(trainer: Trainer) -> Evaluation:
    conditions = trainer.policy.encode(trainer.prompts.held_out)
    return _evaluated(
        trainer.policy, conditions, trainer.rewards, trainer.prompts, trainer.plan, trainer.settings, base=True
    )


class _Narrator:
    """Events as lines on the terminal."""

    def __init__(self) -> None:
        self._iterations = 0
        self._began = time.monotonic()
        self._first = 0

    def __call__(self, event: object) -> None:
        match event:
            case Started():
                self._iterations, self._first, self._began = event.iterations, event.first_iteration, time.monotonic()
                print(describe_cost(event), flush=True)
            case Evaluation():
                print(f"held-out reward after {event.iteration} iterations: {event.reward:.4f}", flush=True)
            case Step():
                m = event.metrics
                each = (time.monotonic() - self._began) / (event.iteration - self._first)
                print(
                    f"{event.iteration:>5}/{self._iterations}  reward {m['reward']:.4f} (spread {m['reward_std']:.4f})  "
                    f"gradient {m['grad_norm']:.2e}  {m['seconds']:.1f} s, "
                    f"{duration(each * (self._iterations - event.iteration))} left",
                    flush=True,
                )
            case Warned():
                pass  # logged by the run


# --- the other commands ----------------------------------------------------------------------------------------------


def evaluate(given: dict) -> int:
    """``egrpo eval``"""
    from safetensors.torch import load_file

    from .backends.diffusers_flux import lora_options
    from .plots import image_grid, plot_comparison

    explicit, path = _plain_options(given), given["lora"]
    prompts: PromptSet | None = None
    if path.is_dir():
        config = Run.open(path).config
        if "options" not in config:
            raise InputError(f"{path} was not made by egrpo train: give its LoRA file with --demo or --model")
        explicit = config["options"] | {"output": "."} | explicit
        if "prompts" not in given:
            prompts = PromptSet(*(tuple(config["prompts"][part]) for part in ("train", "held_out")))
        path = path / "lora.safetensors"
    if not path.is_file():
        raise InputError(f"LoRA file {path} does not exist")
    options = _with_defaults({"output": ".", "eval_samples": 4} | explicit)
    _check_model(options)
    if prompts is None:
        # Nothing is trained here, so every prompt of a file is used.
        chosen = _prompts(options)
        every = tuple(dict.fromkeys(chosen.train + chosen.held_out))
        prompts = PromptSet(every, every) if "prompts" in given else chosen
    settings, rewards, plan = _settings(options), _rewards(options), _plan(options)
    try:
        state = load_file(path)
        fitting = lora_options(state)
    except Exception as error:
        raise InputError(f"{path.name} cannot be read as a LoRA: {error}") from None
    policy = _policy(options | fitting)
    policy.load_lora(state)
    conditions = policy.encode(prompts.held_out)
    before, after = (
        _evaluated(policy, conditions, rewards, prompts, plan, settings, base=base) for base in (True, False)
    )

    output = Path(options["output"])
    output.mkdir(parents=True, exist_ok=True)
    table = evaluation_table(before, after)
    print(table)
    (output / "eval.txt").write_text(table + "\n", encoding="utf-8")
    image_grid(*evaluation_rows([("base", before), ("LoRA", after)])).save(output / "eval_images.png")
    plot_comparison(list(after.scores), before.per_prompt(), after.per_prompt()).save(output / "eval_scores.png")
    print(f"written to {output}: eval.txt, eval_images.png, eval_scores.png")
    return 0


def _evaluated(
    policy: Policy,
    conditions: list,
    rewards: RewardSet,
    prompts: PromptSet,
    plan: Plan,
    settings: TrainSettings,
    base: bool,
) -> Evaluation:
    """The held-out prompts as the trainer evaluates them."""
    return evaluate_policy(
        policy,
        rewards,
        prompts.held_out,
        conditions,
        plan,
        samples=settings.eval_samples,
        seed=settings.seed,
        micro_batch=policy.micro_batch(settings.micro_batch),
        base=base,
    )


def score(given: dict) -> int:
    """``egrpo score``"""
    options = DEFAULTS | _plain_options(given)
    rewards, paths = _rewards(options), _image_paths(given["images"])
    prompts = [given.get("prompt", "")] * len(paths)
    if "prompts" in given:
        prompts = [line for line in read_prompt_file(given["prompts"]) if line.strip()]
        if len(prompts) != len(paths):
            raise InputError(f"{given['prompts'].name} has {len(prompts)} prompts for {len(paths)} images: one each")
    images = [_load_image(path) for path in paths]
    try:
        rows = [
            {name: values.item() for name, values in rewards.score(image, [prompt]).items()}
            for image, prompt in zip(images, prompts)
        ]
    except RewardError as error:
        raise _RunFailed(str(error)) from error
    names = list(rows[0])
    if given.get("json"):
        for path, row in zip(paths, rows):
            print(json.dumps({"image": str(path), **row}))
        return 0
    print("  ".join([*(f"{name:>22}" for name in names), "image"]))
    for path, row in zip(paths, rows):
        print("  ".join([*(f"{row[name]:>22.5f}" for name in names), str(path)]))
    return 0


def _image_paths(given: Sequence[Path]) -> list[Path]:
    paths: list[Path] = []
    for path in given:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
            if not found:
                raise InputError(f"folder {path} holds no image ({', '.join(IMAGE_SUFFIXES)})")
            paths += found
        elif path.is_file():
            paths.append(path)
        else:
            raise InputError(f"image {path} does not exist")
    return paths


def _load_image(path: Path) -> Tensor:
    """[1, H, W, 3] float32 in 0..1."""
    from PIL import Image

    from .plots import to_tensor

    try:
        with Image.open(path) as image:
            return to_tensor(image)
    except OSError as error:
        raise InputError(f"image {path} cannot be read: {error}") from None


def show_plan(given: dict) -> int:
    """``egrpo plan``"""
    plan = _plan(DEFAULTS | _plain_options(given))
    group_size = given.get("group_size", TrainSettings.group_size)
    if group_size < 2:
        raise InputError(
            f"--group-size is {group_size}; it must be at least 2 (a group of one has no relative advantage)"
        )
    print(json.dumps(plan.to_dict(), indent=2) if given.get("json") else plan.table(group_size))
    if "plot" in given:
        from .plots import plot_plan

        plot_plan(plan).save(given["plot"])
    return 0


def plot(given: dict) -> int:
    """``egrpo plot``"""
    from .plots import plot_training

    path = given["run"]
    folder = path if path.is_dir() else path.parent
    if not (folder / "metrics.jsonl").is_file() or (path.is_file() and path.name != "metrics.jsonl"):
        raise InputError(f"{path} is neither a run folder with metrics nor a metrics.jsonl file")
    target = given.get("output", folder / "curves.png")
    plot_training(Run(folder).history).save(target)
    print(target)
    return 0
