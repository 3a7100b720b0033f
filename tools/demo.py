"""``make demo``: queue the demo training workflow in a real ComfyUI, or run it headless where there is none."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from pathlib import Path

from egrpo.plots import sparkline
from tools.comfyui import PACK, ComfyError, ComfyServer, find_comfyui, raise_for_status

WORKFLOW = PACK / "tests" / "api" / "demo_train.json"
TRAIN_NODE = "EGRPOTrainLora"
RESULTS = PACK / "runs" / "demo"
TIMEOUT_SECONDS = 3600


def main() -> int:
    """Entry point; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="[demo] %(message)s")
    try:
        comfy = find_comfyui()
        if comfy is None:
            _say("No ComfyUI here and none could be cloned: running the same training headless on diffusers' FLUX.")
            return _headless()
        return _in_comfyui(comfy)
    except ComfyError as error:
        _say(f"failed: {error}")
        return 1


def _headless() -> int:
    from egrpo.cli import main as egrpo

    return egrpo(["train", "--demo", "--output", str(RESULTS)])


def _in_comfyui(comfy: Path) -> int:
    prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    _say(f"starting ComfyUI from {comfy}")
    # One thread: the model is tiny, and threads that wait for each other on a busy machine cost more than they gain.
    with ComfyServer(comfy, output=RESULTS, environment={"OMP_NUM_THREADS": "1"}) as server:
        display = _Display(prompt, server.output)
        _say(f"ComfyUI listens on {server.url}; open it to look inside. Ctrl-C stops the training and keeps the run.")
        prompt_id = server.queue(prompt)
        try:
            entry = server.wait(prompt_id, display.on_event, TIMEOUT_SECONDS)
        except KeyboardInterrupt:
            display.end_line()
            _say("stopping: the run is being saved")
            server.interrupt()
            server.wait(prompt_id, timeout=120)
            _report(server, display, None)
            return 130
        display.end_line()
        try:
            raise_for_status(entry)
        except ComfyError:
            _report(server, display, None)
            raise
        _report(server, display, entry)
    return 0


class _Display:
    """One line of the terminal that follows the run; a line per iteration where the output is no terminal."""

    def __init__(self, prompt: dict, output: Path) -> None:
        self._titles = {key: node["class_type"] for key, node in prompt.items()}
        train = next((node for node in prompt.values() if node["class_type"] == TRAIN_NODE), {"inputs": {}})
        self._iterations = train["inputs"].get("iterations")
        self._started = time.time()
        self._output = output
        self._live = sys.stdout.isatty()
        self._node = ""
        self._progress = ""
        self._shown = 0

    def run_folder(self) -> Path | None:
        """The folder of the run that this demo has started, once it exists."""
        runs = [f for f in (self._output / "egrpo").glob("*/metrics.jsonl") if f.stat().st_mtime >= self._started]
        return max(runs, key=lambda file: file.stat().st_mtime).parent if runs else None

    def rewards(self) -> list[float]:
        """Mean reward of each iteration so far."""
        folder = self.run_folder()
        if folder is None:
            return []
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
        # The last piece is empty, or a line that is being written at this moment.
        records = [json.loads(line) for line in lines[:-1]]
        return [record["reward"] for record in records if "reward" in record]

    def on_event(self, kind: str, data: dict) -> None:
        if kind == "executing" and data.get("node"):
            self._node = self._titles.get(data["node"], data["node"])
            self._progress = ""
            if not self._live:
                _say(self._node)
        elif kind == "progress":
            self._progress = f"{100 * data['value'] / max(data['max'], 1):3.0f}%"
        else:
            return
        rewards = self.rewards()
        if self._live:
            line = f"[demo] {time.time() - self._started:4.0f} s  {self._node} {self._progress}  {self._curve(rewards)}"
            print("\r" + line[: shutil.get_terminal_size().columns - 1].ljust(78), end="", flush=True)
        elif len(rewards) > self._shown:
            _say(self._curve(rewards))
        self._shown = len(rewards)

    def _curve(self, rewards: list[float]) -> str:
        if not rewards:
            return ""
        of = f"/{self._iterations}" if self._iterations else ""
        return f"iteration {len(rewards)}{of}  reward {rewards[-1]:.4f}  {sparkline(rewards)}"

    def end_line(self) -> None:
        """Leave the live line standing."""
        if self._live:
            print(flush=True)


def _report(server: ComfyServer, display: _Display, entry: dict | None) -> None:
    """Say what the run has left and where; the server's own folders vanish with it, so its LoRA is copied."""
    rewards = display.rewards()
    if rewards:
        _say(f"mean reward of the rollouts: {rewards[0]:.4f} -> {rewards[-1]:.4f}  {sparkline(rewards)}")
    shown: set[str] = set()
    for _, outputs in sorted((entry or {}).get("outputs", {}).items()):
        # The report comes from the training node and again from the node that displays it.
        for text in outputs.get("text", ()):
            if text not in shown:
                print(text)
            shown.add(text)
        for image in outputs.get("images", ()):
            if image["type"] == "output":
                _say(f"image   {_shown(server.output / image['subfolder'] / image['filename'])}")
    for lora in sorted((server.base / "models" / "loras").rglob("*.safetensors")):
        _say(f"LoRA    {_shown(Path(shutil.copy2(lora, RESULTS)))}")
    folder = display.run_folder()
    if folder is None:
        _say("the run had not begun, so nothing was saved")
    else:
        _say(f"run     {_shown(folder)} (settings, metrics, checkpoints, images)")


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
