"""``python -m tools.make_workflows``: the example workflows and their thumbnails, written by ComfyUI's own front end.

Each API prompt of ``tests/api`` is loaded into the front end of a running ComfyUI, its nodes are laid out, a note is
added, and what the front end would save is written to ``workflows``. Loading that again must give the API prompt back.
The API prompts are the source; run this after changing one of them or a node's inputs. Needs playwright and a Chromium.

The demo workflows are run as well, so that their thumbnails show real results (``--no-run`` skips that).
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

from PIL import Image, ImageOps

from tools.comfyui import PACK, ComfyServer, find_comfyui

logger = logging.getLogger(__name__)

API = PACK / "tests" / "api"
WORKFLOWS = PACK / "workflows"
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.UseNewMenu": "Disabled",
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Graph.CanvasMenu": False,
    "Comfy.Workflow.Persist": False,
}
ONLY_CANVAS = (
    ".comfy-menu, .comfyui-body-top, .p-toast, .workflow-tabs, .side-tool-bar-container { display: none !important }"
)
LOADER_FILES = (
    "diffusion_models/flux1-dev.safetensors", "text_encoders/clip_l.safetensors",
    "text_encoders/t5xxl_fp16.safetensors", "vae/ae.safetensors",
)  # fmt: skip
"""Stand-ins of no content, so that the front end does not mark the loaders' files as missing."""
RUN_SECONDS = 3600
THUMBNAIL_SIZE = (720, 450)
THUMBNAIL_BYTES = 60_000
GROUND = (255, 255, 255)
COLUMN_GAP, ROW_GAP, TITLE = 60, 30, 30


@dataclass(frozen=True)
class Example:
    """One example workflow: where it comes from and how it is laid out.

    columns: per column, (node id, width, height) from top to bottom; heights are raised to what the node needs.
    note: markdown shown on the canvas, with its width and height.
    crops: the parts (left, top, right, bottom of 1) of the pictures that a run saves that make the thumbnail, side by
        side; empty where the example is not run and the canvas itself is shown.
    """

    api: str
    name: str
    columns: tuple[tuple[tuple[str, int, int], ...], ...]
    titles: tuple[str, ...]
    note: str
    note_size: tuple[int, int]
    crops: tuple[tuple[float, float, float, float], ...] = ()


EXAMPLES = (
    Example(
        api="demo_train",
        name="egrpo_demo_train",
        columns=(
            (("1", 340, 90), ("2", 460, 400), ("3", 340, 160)),
            (("4", 420, 560),),
            (("5", 440, 900),),
            (("6", 480, 400), ("9", 480, 330)),
            (("7", 560, 460), ("8", 560, 460)),
        ),
        titles=("Models, prompts, reward", "What explores", "Training", "Look at", "Results (saved in output/egrpo)"),
        note=(
            "## E-GRPO: train a demo LoRA\n\n"
            "Press **Run**. A CPU is enough: some minutes.\n\n"
            "The model draws coloured shapes and confuses half of what the words mean. A tiny CLIP rewards pictures that "
            "fit their prompt; an exact judge, which training never sees, is watched beside it. In *Before and after* "
            "the pictures come to follow their prompts, which the model has never trained on.\n\n"
            "While it runs, the training node shows the images being compared. **Cancel** stops at once and keeps the "
            "LoRA trained so far.\n\n"
            "Then: load the LoRA with **Load LoRA (Model)** (press R to see it), compare with the *clean* checkpoint, or open the workflow "
            "*egrpo_train_lora* for FLUX.1-dev."
        ),
        note_size=(460, 300),
        crops=((0, 0, 1, 1), (0, 0, 0.68, 1)),
    ),
    Example(
        api="train_lora",
        name="egrpo_train_lora",
        columns=(
            (("1", 340, 110), ("2", 340, 160), ("3", 340, 90)),
            (("4", 520, 420), ("5", 340, 160)),
            (("6", 420, 560),),
            (("7", 440, 900),),
            (("8", 480, 400), ("11", 480, 330), ("12", 340, 120)),
            (("9", 560, 460), ("10", 560, 400), ("13", 340, 120)),
        ),
        titles=("FLUX.1-dev", "Prompts and reward", "What explores", "Training", "Look at and keep", "Results"),
        note=(
            "## E-GRPO: align FLUX.1-dev to a reward\n\n"
            "1. Choose your FLUX.1-dev files in the three loaders.\n"
            "2. Write your prompts, one a line, or choose a file. A few hundred are better than eight.\n"
            "3. Choose the reward. *Sharpness* needs no model and shows that the setup works; connect a learned reward "
            "for quality that people would agree with.\n"
            "4. Before a long run, try *E-GRPO Rollout Preview*: groups must differ, and so must their scores.\n"
            "5. Press **Run**. The log first states evaluations, time and memory.\n\n"
            "The LoRA is saved into the *loras* folder at every checkpoint's end and on **Cancel**. Judge the run by the "
            "held-out reward and by the images, not by the loss, which stays near zero by design."
        ),
        note_size=(340, 420),
    ),
    Example(
        api="rollout_preview",
        name="egrpo_rollout_preview",
        columns=(
            (("1", 340, 90), ("3", 340, 160)),
            (("2", 420, 560),),
            (("4", 460, 560),),
            (("5", 560, 400), ("7", 760, 330)),
            (("6", 640, 800),),
        ),
        titles=("Models and reward", "What explores", "Rollout", "Measure", "Look"),
        note=(
            "## E-GRPO: look before you train\n\n"
            "Press **Run**: one prompt is sampled as training would sample it. The first image is the anchor; each row "
            "below is one active step, whose group starts from the same latent and differs by one random step.\n\n"
            "A step teaches only if its images differ in what the reward sees: compare the spread in the table. Steps "
            "of high entropy spread most.\n\n"
            "Change **eta**, **tau** and the **active steps** in the plan and run again. For FLUX.1-dev, replace the "
            "demo models by the standard loaders and use 512 pixels or more."
        ),
        note_size=(340, 360),
        crops=((0, 0, 1, 0.42),),
    ),
)

LOAD_API = """async ({prompt, name}) => { await app.loadApiJson(prompt, name); }"""

LAY_OUT = """async ({example, gaps}) => {
    const graph = app.rootGraph ?? app.graph;
    const place = (node, x, y, width, height) => {
        const least = node.computeSize();
        node.pos = [x, y];
        node.setSize([Math.max(width, 200), Math.max(height, least[1])]);
        return node.size;
    };
    let x = 0, first = true;
    for (const [i, column] of example.columns.entries()) {
        let y = 0, widest = 0;
        const members = [];
        const add = (node, width, height) => {
            const size = place(node, x, y + gaps.title, width, height);
            y += gaps.title + size[1] + gaps.row;
            widest = Math.max(widest, size[0]);
            members.push(node);
        };
        if (first) {
            const note = LiteGraph.createNode("MarkdownNote");
            graph.add(note);
            note.title = "Read me";
            note.widgets[0].value = example.note;
            note.color = "#432"; note.bgcolor = "#653";
            add(note, ...example.note_size);
            first = false;
        }
        for (const [id, width, height] of column) add(graph.getNodeById(Number(id)) ?? graph.getNodeById(id), width, height);
        const group = new LiteGraph.LGraphGroup(example.titles[i]);
        group.pos = [x - 15, -50];
        group.size = [widest + 30, y - gaps.row + 65];
        group.color = "#3f789e";
        graph.add(group);
        x += widest + gaps.column;
    }
    graph.setDirtyCanvas(true, true);
}"""

SERIALIZE = "() => JSON.stringify((app.rootGraph ?? app.graph).serialize())"  # as saved: without what is undefined
LOAD_UI = "async ({workflow, name}) => { await app.loadGraphData(workflow, true, true, name); }"
TO_PROMPT = "async () => (await app.graphToPrompt()).output"
SHOW = """(box) => {
    const [x, y, width, height] = box, canvas = app.canvas, ds = canvas.ds, element = canvas.canvas;
    const ratio = window.devicePixelRatio || 1;
    ds.scale = Math.min(element.width / ratio / width, element.height / ratio / height);
    ds.offset = [-x + (element.width / ratio / ds.scale - width) / 2, -y + (element.height / ratio / ds.scale - height) / 2];
    canvas.setDirty(true, true); canvas.draw(true, true);
}"""
MIDDLE = """() => {
    const graph = app.rootGraph ?? app.graph, groups = (graph.groups ?? graph._groups).slice(1, -1);
    const least = i => Math.min(...groups.map(group => group.pos[i]));
    const most = i => Math.max(...groups.map(group => group.pos[i] + group.size[i]));
    return [least(0), least(1), most(0) - least(0), most(1) - least(1)];
}"""


def plain_prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    """An API prompt without titles and other notes: what is computed."""
    return {key: {"class_type": node["class_type"], "inputs": node["inputs"]} for key, node in prompt.items()}


def make(page: Any, example: Example) -> dict[str, Any]:
    """The example in UI format, checked by loading it again.

    Raises:
        RuntimeError: the front end does not give the API prompt back.
    """
    prompt = json.loads((API / f"{example.api}.json").read_text(encoding="utf-8"))
    page.evaluate(LOAD_API, {"prompt": prompt, "name": example.name})
    page.wait_for_timeout(500)
    layout = {
        "columns": example.columns,
        "titles": example.titles,
        "note": example.note,
        "note_size": example.note_size,
    }
    page.evaluate(LAY_OUT, {"example": layout, "gaps": {"column": COLUMN_GAP, "row": ROW_GAP, "title": TITLE}})
    page.wait_for_timeout(500)
    workflow = json.loads(page.evaluate(SERIALIZE))
    workflow.pop("id", None)
    workflow["extra"] = {}
    page.evaluate(LOAD_UI, {"workflow": workflow, "name": example.name})
    page.wait_for_timeout(500)
    again = plain_prompt(page.evaluate(TO_PROMPT))
    if again != plain_prompt(prompt):
        raise RuntimeError(
            f"{example.name}: the round trip through the front end changed the prompt:\n{differences(plain_prompt(prompt), again)}"
        )
    return workflow


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The inputs in which two API prompts differ, one a line."""
    lines = []
    for key in sorted({*before, *after}):
        old, new = (prompt.get(key, {"inputs": {}})["inputs"] for prompt in (before, after))
        lines += [
            f"node {key} {name}: {old.get(name)!r} -> {new.get(name)!r}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    return "\n".join(lines)


def save_thumbnail(picture: Image.Image, path: Path) -> None:
    """Write ``picture``, scaled into the thumbnail's size, as a JPEG of at most 60 kB."""
    picture = ImageOps.pad(picture.convert("RGB"), THUMBNAIL_SIZE, Image.Resampling.LANCZOS, color=GROUND)
    for quality in range(92, 30, -6):
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality, optimize=True)
        if data.tell() <= THUMBNAIL_BYTES:
            break
    path.write_bytes(data.getvalue())


def canvas_picture(page: Any) -> Image.Image:
    """The canvas with the middle of the workflow (all groups but the first and the last) in view."""
    page.evaluate(SHOW, page.evaluate(MIDDLE))
    page.wait_for_timeout(700)
    return Image.open(io.BytesIO(page.screenshot()))


def result_picture(server: ComfyServer, example: Example) -> Image.Image:
    """The pictures that a run of the example saves, cropped and side by side, each as wide as it is at full height."""
    outputs = server.run(json.loads((API / f"{example.api}.json").read_text(encoding="utf-8")), timeout=RUN_SECONDS)
    files = [
        server.output / image["subfolder"] / image["filename"]
        for key in sorted(outputs, key=int)
        for image in outputs[key].get("images", ())
        if image["type"] == "output"
    ]
    sheet = Image.new("RGB", THUMBNAIL_SIZE, GROUND)
    left = 0
    for file, (x0, y0, x1, y1) in zip(files, example.crops, strict=True):
        picture = Image.open(file).convert("RGB")
        width, height = picture.size
        picture = picture.crop((round(x0 * width), round(y0 * height), round(x1 * width), round(y1 * height)))
        picture = ImageOps.contain(picture, (sheet.width - left, sheet.height), Image.Resampling.LANCZOS)
        sheet.paste(picture, (left, (sheet.height - picture.height) // 2))
        left += picture.width
    return sheet


@contextmanager
def front_end(server: ComfyServer, chromium: str) -> Iterator[Any]:
    """A page of the running ComfyUI with nothing but the canvas on it."""
    from playwright.sync_api import sync_playwright

    server.post("/settings", SETTINGS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": 1920, "height": 1200})
        page.goto(server.url)
        page.wait_for_function("window.app?.vueAppReady && window.app.extensionManager", timeout=120_000)
        page.add_style_tag(content=ONLY_CANVAS)
        yield page
        browser.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m tools.make_workflows", description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium", help="path of Chromium")
    parser.add_argument("--no-run", action="store_true", help="do not run the demo workflows; keep their thumbnails")
    options = parser.parse_args(arguments)
    comfy = find_comfyui()
    if comfy is None:
        logger.error("ComfyUI was not found; set COMFYUI_PATH")
        return 1
    WORKFLOWS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as base:
        for name in LOADER_FILES:
            file = Path(base) / "models" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        with ComfyServer(comfy, base=Path(base)) as server, front_end(server, options.chromium) as page:
            for example in EXAMPLES:
                workflow = make(page, example)
                text = json.dumps(workflow, indent=2, ensure_ascii=False)
                (WORKFLOWS / f"{example.name}.json").write_text(text + "\n", encoding="utf-8")
                picture = WORKFLOWS / f"{example.name}.jpg"
                if not example.crops:
                    save_thumbnail(canvas_picture(page), picture)
                elif not options.no_run:
                    save_thumbnail(result_picture(server, example), picture)
                logger.info("wrote %s", example.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
