"""Find, fetch and run ComfyUI with this pack linked in. Standard library only, apart from aiohttp (which ComfyUI itself
requires) for the event stream.

Used by ``make demo`` and by the tests that need a real server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

logger = logging.getLogger(__name__)

PACK = Path(__file__).resolve().parents[1]
"""This repository: the folder that ComfyUI loads from custom_nodes."""

CLONE_FOLDER = PACK / ".comfyui"
CLONE_URL = "https://github.com/comfyanonymous/ComfyUI.git"
CLONE_TAG = "v0.33.0"
CLONE_SECONDS = 180

EventListener = Callable[[str, dict], None]
"""Told (type, data) of each message of the server, for example ``("progress", {"value": 3, "max": 40, ...})``."""


class ComfyError(RuntimeError):
    """ComfyUI cannot be found, does not start, refuses a prompt, or fails in one."""


def is_comfyui(folder: Path) -> bool:
    """True when ``folder`` is a checkout of ComfyUI."""
    return (folder / "main.py").is_file() and (folder / "comfy" / "samplers.py").is_file()


def find_comfyui() -> Path | None:
    """ComfyUI's folder: ``COMFYUI_PATH``, else the folder above ``custom_nodes``, ``~/ComfyUI``, or the own clone.

    ``COMFYUI_PATH=none`` means: do without.

    Raises:
        ComfyError: COMFYUI_PATH is set to something else than a ComfyUI folder.
    """
    chosen = os.environ.get("COMFYUI_PATH", "")
    if chosen.lower() == "none":
        return None
    if chosen:
        if not is_comfyui(Path(chosen)):
            raise ComfyError(
                f"COMFYUI_PATH is {chosen}, which is not a ComfyUI folder (no main.py and comfy/): correct it, or "
                "unset it to let ComfyUI be found"
            )
        return Path(chosen).resolve()
    candidates = [Path.home() / "ComfyUI", CLONE_FOLDER]
    if PACK.parent.name == "custom_nodes":
        candidates.insert(0, PACK.parents[1])
    return next((folder for folder in candidates if is_comfyui(folder)), None)


def clone_comfyui(tag: str = CLONE_TAG, folder: Path = CLONE_FOLDER) -> Path | None:
    """Shallow clone of ``tag`` of the official repository, or None where the network does not allow it.

    ``EGRPO_NO_CLONE=1`` and ``COMFYUI_PATH=none`` skip the attempt.
    """
    if os.environ.get("EGRPO_NO_CLONE") == "1" or os.environ.get("COMFYUI_PATH", "").lower() == "none":
        return None
    if shutil.which("git") is None:
        logger.warning("git is not installed, so ComfyUI %s cannot be cloned", tag)
        return None
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, CLONE_URL, str(partial)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CLONE_SECONDS,
        )
        failure = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except subprocess.TimeoutExpired:
        failure = [f"no answer within {CLONE_SECONDS} s"]
    if failure is not None:
        shutil.rmtree(partial, ignore_errors=True)
        logger.warning("ComfyUI %s could not be cloned: %s", tag, " ".join(failure) or "git failed")
        return None
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def requirements_without_torch(comfy: Path) -> list[str]:
    """Lines of ComfyUI's requirements.txt but torch, torchvision and torchaudio, which must match the installed torch."""
    lines = (comfy / "requirements.txt").read_text(encoding="utf-8").splitlines()
    stated = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [line for line in stated if not re.match(r"(torch|torchvision|torchaudio)\b", line)]


def install_requirements(python: Path | str, comfy: Path) -> None:
    """Install what ComfyUI needs into ``python``'s environment without touching its torch.

    torchaudio comes without its dependencies: it would otherwise pull a torch of its own version.

    Raises:
        ComfyError: pip failed; carries the end of its output.
    """
    pip_install(python, requirements_without_torch(comfy))
    pip_install(python, ["--no-deps", "torchaudio"])


def pip_install(python: Path | str, arguments: Sequence[str]) -> None:
    """``pip install`` quietly.

    Raises:
        ComfyError: pip failed; carries the end of its output.
    """
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise ComfyError(f"pip install {' '.join(arguments)} failed:\n{done.stdout[-3000:]}")


def has_accelerator(python: Path | str = sys.executable) -> bool:
    """True when the torch of ``python`` can use an accelerator; ComfyUI needs --cpu where it cannot."""
    probe = "import torch; print(any(a.is_available() for a in (torch.cuda, torch.backends.mps, torch.xpu)))"
    done = subprocess.run([str(python), "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() == "True"


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ComfyServer:
    """A ComfyUI process with the pack linked in, as a context manager.

    Everything it writes (models, output, user data, database) lies under ``base``, never in the user's ComfyUI.

    Args:
        comfy: ComfyUI's folder.
        base: ComfyUI's base directory; a temporary folder, removed at the end, when not given.
        output: where images and runs are written; ``base``/output when not given.
        python: interpreter with ComfyUI's requirements.
        cpu: pass --cpu; None asks torch.
        packs: further custom-node folders to link in.
        arguments: further arguments of ComfyUI's main.py.
        environment: variables added to the process's environment.
        start_seconds: how long the start may take.
    """

    def __init__(
        self,
        comfy: Path,
        *,
        base: Path | None = None,
        output: Path | None = None,
        python: Path | str = sys.executable,
        cpu: bool | None = None,
        packs: Sequence[Path] = (),
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        start_seconds: float = 180,
    ) -> None:
        self.comfy = Path(comfy)
        self.base = Path(base).resolve() if base else Path(tempfile.mkdtemp(prefix="egrpo-comfyui-"))
        self.output = Path(output).resolve() if output else self.base / "output"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client_id = uuid.uuid4().hex
        self._temporary = base is None
        self._python = python
        self._cpu = cpu
        self._packs = (PACK, *packs)
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._start_seconds = start_seconds
        self._process: subprocess.Popen | None = None
        self._events: queue.Queue[tuple[str, dict]] = queue.Queue()
        self._connected = threading.Event()
        self._closing = threading.Event()

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self.base / "comfyui.log"

    def log(self) -> str:
        """The server's log so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> ComfyServer:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        for name in ("custom_nodes", "input", "models", "temp", "user"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self.output.mkdir(parents=True, exist_ok=True)
        for pack in self._packs:
            link = self.base / "custom_nodes" / ("ComfyUI-EGRPO" if pack == PACK else pack.name)
            link.unlink(missing_ok=True)
            link.symlink_to(pack.resolve(), target_is_directory=True)
        command = [str(self._python), "main.py", "--port", str(self.port), "--disable-api-nodes"]
        command += ["--base-directory", str(self.base), "--output-directory", str(self.output)]
        # The base directory does not move the database, which a second ComfyUI could not open.
        command += ["--database-url", "sqlite:///:memory:", *self._arguments]
        if self._cpu if self._cpu is not None else not has_accelerator(self._python):
            command.append("--cpu")
        with open(self.log_path, "wb") as log:
            # A session of its own, so that Ctrl-C reaches this program and not the server.
            self._process = subprocess.Popen(
                command,
                cwd=self.comfy,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._start_seconds
        while not self._answers():
            self._check_alive()
            if time.monotonic() > deadline:
                raise ComfyError(
                    f"ComfyUI did not answer within {self._start_seconds:g} s. Its log ends:\n{self._tail()}"
                )
            time.sleep(0.25)
        threading.Thread(target=self._listen, daemon=True).start()
        self._connected.wait(timeout=10)

    def _answers(self) -> bool:
        try:
            self.get("/system_stats", timeout=2)
        except (ComfyError, OSError):
            return False
        return True

    def _check_alive(self) -> None:
        if self._process is None or self._process.poll() is None:
            return
        raise ComfyError(f"ComfyUI ended with code {self._process.returncode}. Its log ends:\n{self._tail()}")

    def _tail(self, lines: int = 30) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def _stop(self) -> None:
        self._closing.set()
        if self._process is not None and self._process.poll() is None:
            self._signal("SIGTERM")
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._signal("SIGKILL")
                self._process.wait()
        if self._temporary:
            shutil.rmtree(self.base, ignore_errors=True)

    def _signal(self, name: str) -> None:
        if hasattr(os, "killpg"):
            os.killpg(self._process.pid, getattr(signal, name))
        else:
            self._process.kill()

    # Requests

    def get(self, path: str, timeout: float = 30) -> Any:
        """GET a JSON route.

        Raises:
            ComfyError: the server refuses; carries its answer.
        """
        return self._request(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: dict | None = None, timeout: float = 30) -> Any:
        """POST a JSON body to a route; raises as :meth:`get`."""
        data = json.dumps(body or {}).encode()
        return self._request(
            urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), timeout
        )

    def _request(self, request: urllib.request.Request, timeout: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise ComfyError(f"{request.get_method()} {request.selector}: {_explain(answer)}") from None
        return json.loads(text) if text else None

    def object_info(self, node: str | None = None) -> dict:
        """Schemas of all nodes, or of one."""
        return self.get(f"/object_info/{node}" if node else "/object_info")

    def queue(self, prompt: dict) -> str:
        """Queue an API-format prompt; returns its id.

        Raises:
            ComfyError: the prompt is not valid; names each node, input and reason. ComfyUI runs a prompt without the
                outputs that have errors; here it is taken back instead.
        """
        answer = self.post("/prompt", {"prompt": prompt, "client_id": self.client_id})
        if answer.get("node_errors"):
            self.post("/queue", {"delete": [answer["prompt_id"]]})
            self.interrupt()
            raise ComfyError("\n".join(_node_errors(answer)))
        return answer["prompt_id"]

    def history(self, prompt_id: str) -> dict | None:
        """The history entry of a prompt (``outputs``, ``status``), or None while it waits or runs."""
        return self.get(f"/history/{prompt_id}").get(prompt_id)

    def interrupt(self) -> None:
        """Stop the running prompt, as the Cancel button does."""
        self.post("/interrupt")

    def wait(self, prompt_id: str, on_event: EventListener | None = None, timeout: float = 600) -> dict:
        """Wait until a prompt has ended, in whatever way; returns its history entry.

        Args:
            on_event: told every event of the server meanwhile, on this thread.

        Raises:
            ComfyError: the server died, or the prompt did not end within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            for kind, data in self._events_within(0.3):
                if on_event:
                    on_event(kind, data)
            self._check_alive()
            entry = self.history(prompt_id)
            if entry is not None:
                for kind, data in self._events_within(0.0):
                    if on_event:
                        on_event(kind, data)
                return entry
            if time.monotonic() > deadline:
                raise ComfyError(f"prompt {prompt_id} did not end within {timeout:g} s. The log ends:\n{self._tail()}")

    def run(self, prompt: dict, on_event: EventListener | None = None, timeout: float = 600) -> dict:
        """Queue a prompt and wait for its success; returns ``{node id: {ui outputs}}``.

        Raises:
            ComfyError: it was refused, interrupted, or a node failed; names the node and the exception.
        """
        entry = self.wait(self.queue(prompt), on_event, timeout)
        raise_for_status(entry)
        return entry["outputs"]

    def _events_within(self, seconds: float) -> Iterator[tuple[str, dict]]:
        """Events that have arrived, waiting at most ``seconds`` for the first."""
        block = seconds > 0
        while True:
            try:
                yield self._events.get(block=block, timeout=seconds or None)
            except queue.Empty:
                return
            block = False

    def _listen(self) -> None:
        """Put the server's websocket messages into the queue until the end; runs on its own thread."""
        import aiohttp

        async def listen() -> None:
            async with aiohttp.ClientSession() as session:
                socket_url = f"{self.url}/ws?clientId={self.client_id}"
                async with session.ws_connect(socket_url, max_msg_size=0) as stream:
                    self._connected.set()
                    async for message in stream:
                        # Binary messages are preview images.
                        if message.type == aiohttp.WSMsgType.TEXT:
                            event = json.loads(message.data)
                            self._events.put((event["type"], event.get("data") or {}))

        try:
            asyncio.run(listen())
        except (aiohttp.ClientError, OSError) as error:
            if not self._closing.is_set():
                logger.warning("lost ComfyUI's event stream (%s); progress is no longer shown", error)


def raise_for_status(entry: dict) -> None:
    """Raise :class:`ComfyError` naming the node and its exception unless a history entry reports success."""
    status = entry.get("status") or {}
    if status.get("status_str") == "success":
        return
    for kind, data in status.get("messages", []):
        if kind == "execution_error":
            raise ComfyError(
                f"node {data.get('node_id')} ({data.get('node_type')}) failed: {data.get('exception_type')}: "
                f"{data.get('exception_message')}\n{''.join(data.get('traceback') or [])}"
            )
        if kind == "execution_interrupted":
            raise ComfyError(f"interrupted in node {data.get('node_id')} ({data.get('node_type')})")
    raise ComfyError(f"the prompt did not succeed: {status}")


def _explain(answer: str) -> str:
    """The readable part of ComfyUI's refusal of a prompt; the answer itself when it is something else."""
    try:
        refusal = json.loads(answer)
        lines = [refusal["error"]["message"], *_node_errors(refusal)]
    except (ValueError, KeyError, TypeError):
        return answer[:2000]
    return "\n".join(lines)


def _node_errors(answer: dict) -> list[str]:
    return [
        f"node {node_id} ({problem['class_type']}): {error['message']}: {error['details']}"
        for node_id, problem in (answer.get("node_errors") or {}).items()
        for error in problem["errors"]
    ]
