"""Peak memory of a training iteration against inference, through ComfyUI's FLUX on the CPU.

    python -m benchmarks.memory [--double 4 --single 8 --hidden 512 --size 512]

Three child processes load the same random FLUX: one samples as inference does, one trains with block checkpointing, one
without. Peak resident memory above the loaded model is compared; the LoRA's own state (weights, gradients, two AdamW
moments) is counted apart. Target: with checkpointing at most 1.3 times inference plus that state.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODES = ("inference", "training", "training without checkpointing")


def resident() -> tuple[int, int]:
    """(current, peak) resident bytes of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(mode: str, checkpoint: Path, arguments: argparse.Namespace) -> dict:
    """Run one mode in this process and return bytes above the loaded model."""
    import torch

    from tests.comfy.pack import pack_module, use_comfyui
    from tests.comfy.tiny import conditioning
    from tools.comfyui import find_comfyui

    torch.set_num_threads(2)
    use_comfyui(find_comfyui())
    comfy_policy = pack_module("nodes.comfy_policy")
    import comfy.sd

    from egrpo.rollout import sample_rollout
    from egrpo.schedule import flow_sigmas, plan_steps

    plan = plan_steps(flow_sigmas(16), active=[1, 4], tau=2.2)
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(checkpoint), model_options={"dtype": torch.float32})
        policy = comfy_policy.ComfyPolicy(
            model,
            None,
            None,
            width=arguments.size,
            height=arguments.size,
            rank=arguments.rank,
            checkpoint_blocks="without" not in mode,
        )
        noise = torch.randn(1, *policy.latent_shape)
        with policy:
            policy.rollout(conditioning(), lambda velocity: velocity(noise[..., :8, :8], 0.9))  # loads the model
            loaded, _ = resident()
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
            rollout = policy.rollout(
                conditioning(),
                lambda velocity: sample_rollout(velocity, plan, noise, 2, torch.Generator().manual_seed(0), 1),
            )
            state = 0
            if mode != "inference":
                with policy.normal_mode():
                    optimizer = torch.optim.AdamW(policy.parameters())

                def work(velocity, base_velocity):
                    for group in rollout.groups:
                        velocity(group.x.clone(), group.step.sigma).square().mean().backward()
                        optimizer.step()

                policy.update(conditioning(), work)
                state = 4 * sum(p.numel() * p.element_size() for p in policy.parameters())
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    peak = int(fields["VmHWM"].split()[0]) * 1024
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    return {"mode": mode, "weights": weights, "loaded": loaded, "peak": peak, "lora_state": state}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--double", type=int, default=4)
    parser.add_argument("--single", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--checkpoint", type=Path)
    arguments = parser.parse_args()
    if arguments.mode:
        print("RESULT " + json.dumps(measure(arguments.mode, arguments.checkpoint, arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_model(Path(folder), arguments)
        rows = []
        for mode in MODES:
            command = [sys.executable, "-m", "benchmarks.memory", *sys.argv[1:], "--mode", mode]
            output = subprocess.run(
                [*command, "--checkpoint", str(checkpoint)], cwd=ROOT, capture_output=True, text=True
            )
            line = next((li for li in output.stdout.splitlines() if li.startswith("RESULT ")), None)
            if line is None:
                sys.exit(f"{mode} failed:\n{output.stderr[-3000:]}")
            rows.append(json.loads(line.removeprefix("RESULT ")))
    inference = rows[0]["peak"] - rows[0]["loaded"] + rows[0]["weights"]
    for row in rows:
        used = row["peak"] - row["loaded"] + row["weights"] - row["lora_state"]
        row["ratio_to_inference"] = used / inference
        print(
            f"{row['mode']:32s} activations {(row['peak'] - row['loaded']) / 2**20:7.1f} MiB, weights "
            f"{row['weights'] / 2**20:6.1f} MiB, LoRA state {row['lora_state'] / 2**20:5.1f} MiB, "
            f"{row['ratio_to_inference']:.2f} x inference"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.json").write_text(
        json.dumps({"arguments": vars(arguments) | {"checkpoint": None}, "rows": rows}, indent=1) + "\n"
    )


def write_model(folder: Path, arguments: argparse.Namespace) -> Path:
    """A random FLUX of the asked depth and width."""
    from tests.comfy.tiny import TinyCheckpoints

    tiny = TinyCheckpoints(folder)
    model = tiny.diffusers_model(arguments.double, arguments.single, arguments.hidden)
    return tiny._save("benchmark_flux", model.state_dict())


if __name__ == "__main__":
    main()
