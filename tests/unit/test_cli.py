"""The command line: one path for train and resume, and one clear line with status 2 for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from egrpo import cli
from egrpo.rewards.builtin import TargetColour

SHORT = (
    "train --demo --reward target_colour --device cpu --steps 4 --tau 0 --active 0,1 --group-size 2 --held-out 1 "
    "--prompts-per-iteration 1 --update-every 0 --grouping overlapping --eval-samples 1 --eval-every 0"
)


def run(text: str, *more: object) -> int:
    return cli.main([*text.split(), *map(str, more)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three iterations."""
    output = tmp_path_factory.mktemp("runs")
    assert run(f"{SHORT} --iterations 3 --name whole --output", output) == 0
    return output / "whole_00001"


def test_a_run_leaves_everything(trained: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "lora.safetensors", "report.txt", "images/curves.png", "images/before_after.png"):
        assert (trained / name).is_file(), name
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "reward" in row] == [1, 2, 3]


def test_resuming_equals_never_having_stopped(trained: Path, tmp_path: Path) -> None:
    assert run(f"{SHORT} --iterations 1 --name part --output", tmp_path) == 0
    assert run("resume --device cpu --iterations 3", tmp_path / "part_00001") == 0
    whole, part = (load_file(folder / "lora.safetensors") for folder in (trained, tmp_path / "part_00001"))
    assert whole.keys() == part.keys()
    assert all(torch.equal(whole[key], part[key]) for key in whole)
    report = (tmp_path / "part_00001" / "report.txt").read_text()
    assert report.splitlines()[1] == (trained / "report.txt").read_text().splitlines()[1], "same base, same end"


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    whole_score, calls = TargetColour.score, []

    def score(self, images, prompts):
        calls.append(len(images))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return whole_score(self, images, prompts)

    monkeypatch.setattr(TargetColour, "score", score)
    assert run(f"{SHORT} --iterations 9 --output", tmp_path) == cli.STOPPED
    assert "resume" in capsys.readouterr().err
    stopped_at = int((tmp_path / "egrpo_00001" / "checkpoints").iterdir().__next__().name)
    assert 0 < stopped_at < 9
    assert run(f"resume --device cpu --iterations {stopped_at + 1}", tmp_path / "egrpo_00001") == 0


def test_a_failing_reward_ends_with_status_1_and_a_saved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    whole_score, calls = TargetColour.score, []

    def score(self, images, prompts):
        calls.append(len(images))
        values = whole_score(self, images, prompts)
        return values * float("nan") if len(calls) == 4 else values

    monkeypatch.setattr(TargetColour, "score", score)
    assert run(f"{SHORT} --iterations 9 --output", tmp_path) == cli.FAILED
    error = capsys.readouterr().err
    assert error.startswith("egrpo: reward 'target_colour' returned nan for prompt") and error.count("\n") == 1
    assert (tmp_path / "egrpo_00001" / "lora.safetensors").is_file()


def test_a_dry_run_reads_no_weights_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(cli, "_policy", lambda options: pytest.fail("weights were read"))
    assert run(f"{SHORT} --iterations 5 --dry-run --output", tmp_path / "runs") == 0
    # 4 anchor steps, then two tails of 3 and two of 2 at every iteration
    assert f"dry run: {5 * (4 + 2 * 3 + 2 * 2)} model evaluations and 10 with gradient" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_config_file_gives_options_and_flags_override_it(tmp_path: Path, suffix: str, capsys) -> None:
    values = {"demo": True, "steps": 6, "group_size": 3, "lr": 0.01, "reward": ["sharpness", "target_contrast=2"]}
    path = tmp_path / f"config{suffix}"
    path.write_text(json.dumps(values))  # JSON is YAML
    assert run("train --dry-run --group-size 5 --config", path) == 0
    printed = capsys.readouterr().out
    assert "6 steps" in printed and "group size 5" in printed
    options = cli._read_config(path)
    assert options["learning_rate"] == 0.01 and options["reward"] == values["reward"]


def test_eval_compares_base_and_lora(trained: Path, tmp_path: Path, capsys) -> None:
    """The run's own prompts, noise and reward: the table repeats what the training reported."""
    assert run("eval --device cpu --output", tmp_path, trained) == 0
    table = (tmp_path / "eval.txt").read_text()
    before, after = table.splitlines()[2].split()[1:3]
    assert f"{before} before, {after} after" in (trained / "report.txt").read_text().replace("held-out reward ", "")
    assert (tmp_path / "eval_images.png").is_file() and (tmp_path / "eval_scores.png").is_file()


def test_eval_takes_a_lora_file(trained: Path, tmp_path: Path) -> None:
    options = "eval --demo --reward target_colour --device cpu --steps 4 --eval-samples 1 --held-out 1 --output"
    assert run(options, tmp_path, trained / "lora.safetensors") == 0
    assert "target_colour" in (tmp_path / "eval.txt").read_text()


def test_score_prints_a_row_per_image(tmp_path: Path, capsys) -> None:
    for name, colour in (("a.png", (255, 0, 0)), ("b.png", (0, 0, 255))):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    assert run("score --json --reward target_colour --colour #ff0000", tmp_path) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b.png"]
    assert rows[0]["target_colour"] == 0 and rows[1]["target_colour"] == pytest.approx(-((2 / 3) ** 0.5))


def test_plan_prints_the_papers_merges_and_draws_them(tmp_path: Path, capsys) -> None:
    assert run("plan --plot", tmp_path / "plan.png") == 0
    rows = capsys.readouterr().out.splitlines()[1:9]
    assert [int(row.split()[2]) for row in rows] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert Image.open(tmp_path / "plan.png").width > 100
    assert run("plan --json") == 0
    assert len(json.loads(capsys.readouterr().out)["steps"]) == 8


def test_plot_draws_a_run(trained: Path, tmp_path: Path) -> None:
    assert run("plot --output", tmp_path / "curves.png", trained) == 0
    assert Image.open(tmp_path / "curves.png").width > 100


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("", "COMMAND"),
        ("train", "which model"),
        ("train --model nowhere --prompts nowhere.txt", "nowhere is not a FLUX model"),
        ("train --demo --model nowhere", "not allowed with argument"),
        ("train --demo --prompts nowhere.txt", "prompt file nowhere.txt does not exist"),
        ("train --demo --rank 0", "rank is 0"),
        ("train --demo --size 70", "width is 70"),
        ("train --demo --size big", "neither one number nor"),
        ("train --demo --group-size 1", "group_size is 1"),
        ("train --demo --lr nan", "learning_rate is nan"),
        ("train --demo --tau 99", "reaches entropy tau 99"),
        ("train --demo --merge 0:15", "flips the latent"),
        ("train --demo --targets nothing_like_it", "matches no Linear"),
        ("train --demo --reward nonsense", "unknown built-in reward 'nonsense'"),
        ("train --demo --reward sharpness=much", "KIND=WEIGHT"),
        ("train --demo --reward sharpness --reward sharpness", "share a name"),
        ("train --demo --name ../up", "cannot name a run"),
        ("train --demo --iteration 5", "unrecognized arguments: --iteration"),
        ("train --config nowhere.yaml", "config file nowhere.yaml does not exist"),
        ("resume nowhere", "not a run"),
        ("eval nowhere --demo", "nowhere does not exist"),
        ("score nowhere.png", "nowhere.png does not exist"),
        ("plan --steps 0", "steps is 0"),
        ("plan --group-size 1", "--group-size is 1"),
        ("plot nowhere", "neither a run folder"),
    ],
)
def test_bad_input_is_one_clear_line(
    command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_policy", lambda options: pytest.fail("weights were read"))
    assert run(command) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.startswith("egrpo: ") and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("iteration: 5", "config.yaml: unrecognized arguments: --iteration=5"),
        ("iterations: many", "config.yaml: argument --iterations: invalid int value: 'many'"),
        ("- 1", "must map options to values"),
        ("a: [", "config.yaml cannot be read"),
        ("config: other.yaml", "cannot name another"),
    ],
)
def test_a_bad_config_file_is_named(content: str, text: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.yaml").write_text(content)
    assert run("train --demo --config", tmp_path / "config.yaml") == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_a_finished_run_is_not_resumed_silently(trained: Path, capsys) -> None:
    assert run("resume", trained) == cli.BAD_INPUT
    assert "has reached its 3 iterations" in capsys.readouterr().err


def test_a_run_of_comfyui_is_refused_by_name(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"settings": {}}))
    assert run("resume", tmp_path) == cli.BAD_INPUT
    assert "not made by egrpo train" in capsys.readouterr().err
