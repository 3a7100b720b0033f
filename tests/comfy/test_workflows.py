"""The example workflows fit the nodes as they are now: in UI form for people, in API form for servers and tests."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
API, WORKFLOWS = ROOT / "tests" / "api", ROOT / "workflows"
PAIRS = {
    "egrpo_demo_train": "demo_train",
    "egrpo_train_lora": "train_lora",
    "egrpo_rollout_preview": "rollout_preview",
}
NOTES = {"MarkdownNote", "Note"}
"""Nodes of the front end alone."""
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
MODEL_FILES = {"unet_name", "clip_name1", "clip_name2", "vae_name"}
"""Choices that depend on what the user has."""
FRONT_END_WIDGETS = {
    "PreviewAny": {"preview_markdown", "preview_text", "previewMode"},
    "SaveImage": {"image"},
    "PreviewImage": {"image"},
}


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mappings(pack) -> dict[str, type]:
    """ComfyUI's own nodes, its extras and the pack's, in the mapping that ComfyUI's executor looks nodes up in."""
    import nodes

    async def load() -> None:
        extras = Path(nodes.__file__).parent / "comfy_extras"
        for name in ("nodes_preview_any", "nodes_train"):
            assert await nodes.load_custom_node(str(extras / f"{name}.py"), module_parent="comfy_extras")
        for node in await (await pack.comfy_entrypoint()).get_node_list():
            nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node

    asyncio.run(load())
    return nodes.NODE_CLASS_MAPPINGS


@pytest.fixture(scope="module")
def schemas(mappings) -> dict[str, dict]:
    """{class: {"inputs": {name: (type, options)}, "required": names, "outputs": types}} as /object_info gives them."""

    def schema(kind: type) -> dict:
        given = kind.INPUT_TYPES()
        inputs = {**given.get("required", {}), **given.get("optional", {})}
        read = {}
        for name, spec in inputs.items():
            options = spec[1] if len(spec) > 1 else {}
            if isinstance(spec[0], (list, tuple)):
                read[name] = ("COMBO", {**options, "options": list(spec[0])})
            else:
                read[name] = (str(spec[0]), options)
        return {
            "inputs": read,
            "required": set(given.get("required", {})),
            "outputs": [str(t) for t in kind.RETURN_TYPES],
        }

    used = {node["class_type"] for api in PAIRS.values() for node in read(API, api).values()}
    missing = used - mappings.keys()
    assert not missing, f"workflows use nodes that do not exist: {missing}"
    return {name: schema(mappings[name]) for name in used}


def is_widget(kind: str, options: dict) -> bool:
    return kind in WIDGET_TYPES and not options.get("forceInput")


def fits(kind: str, options: dict, name: str, value: Any) -> bool:
    """Whether a widget takes a value, by its type, limits and choices."""
    if kind == "COMBO":
        return name in MODEL_FILES or value in options["options"]
    if kind == "BOOLEAN":
        return isinstance(value, bool)
    if kind == "STRING":
        return isinstance(value, str)
    number = isinstance(value, int) if kind == "INT" else isinstance(value, (int, float))
    low, high = options.get("min", value), options.get("max", value)
    return number and not isinstance(value, bool) and low <= value <= high


def links_match(given: str, wanted: str) -> bool:
    return "*" in (given, wanted) or bool(set(given.split(",")) & set(wanted.split(",")))


def test_every_workflow_has_both_forms_and_a_thumbnail() -> None:
    assert {path.stem for path in WORKFLOWS.glob("*.json")} == set(PAIRS)
    assert {path.stem for path in WORKFLOWS.glob("*.jpg")} == set(PAIRS)
    for name, api in PAIRS.items():
        assert (API / f"{api}.json").is_file()
        picture = WORKFLOWS / f"{name}.jpg"
        assert picture.stat().st_size <= 60_000
        with Image.open(picture) as image:
            assert 500 <= image.width <= 800 and image.format == "JPEG"


@pytest.mark.parametrize("name", PAIRS.values())
def test_api_prompts_fit_the_schemas(schemas, name) -> None:
    prompt = read(API, name)
    for key, node in prompt.items():
        schema, inputs = schemas[node["class_type"]], node["inputs"]
        where = f"node {key} ({node['class_type']})"
        assert set(inputs) <= set(schema["inputs"]), where
        assert schema["required"] <= set(inputs), f"{where} lacks {schema['required'] - set(inputs)}"
        for input_name, value in inputs.items():
            kind, options = schema["inputs"][input_name]
            if isinstance(value, list):
                source, slot = value
                given = schemas[prompt[source]["class_type"]]["outputs"][slot]
                assert links_match(given, kind), f"{where}.{input_name} wants {kind}, gets {given}"
            else:
                assert is_widget(kind, options) and fits(kind, options, input_name, value), (
                    f"{where}.{input_name}: {value!r}"
                )


@pytest.mark.parametrize("name, api", PAIRS.items())
def test_ui_form_gives_the_api_form(schemas, name, api) -> None:
    """Links and widget values of the UI form, read in the schemas' order as the front end reads them."""
    workflow, prompt = read(WORKFLOWS, name), read(API, api)
    links = {link[0]: link for link in workflow["links"]}
    seen = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        key, schema = str(node["id"]), schemas[node["type"]]
        inputs = {}
        for slot, item in enumerate(node["inputs"]):
            if item.get("link") is None:
                continue
            _, source, source_slot, target, target_slot, kind = links[item["link"]]
            assert (target, target_slot) == (node["id"], slot)
            given = schemas[prompt[str(source)]["class_type"]]["outputs"][source_slot]
            assert links_match(given, schema["inputs"][item["name"]][0]) and links_match(kind, given)
            inputs[item["name"]] = [str(source), source_slot]
        widgets = [n for n, (kind, options) in schema["inputs"].items() if is_widget(kind, options) and n not in inputs]
        values = node.get("widgets_values", [])
        extra = len(values) - len(widgets)
        assert extra == 0 or 0 < extra <= len(FRONT_END_WIDGETS.get(node["type"], ())), (
            f"{key} {node['type']}: {values}"
        )
        inputs.update(zip(widgets, values))
        seen[key] = {"class_type": node["type"], "inputs": inputs}
        assert node["title"] == prompt[key]["_meta"]["title"]
    assert seen == {key: {"class_type": n["class_type"], "inputs": n["inputs"]} for key, n in prompt.items()}


@pytest.mark.parametrize("name", PAIRS)
def test_nodes_do_not_overlap_and_a_note_explains(name) -> None:
    workflow = read(WORKFLOWS, name)
    assert [node["type"] for node in workflow["nodes"]].count("MarkdownNote") == 1
    title = 30
    boxes = [(x, y - title, x + w, y + h) for (x, y), (w, h) in ((n["pos"], n["size"]) for n in workflow["nodes"])]
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


@pytest.mark.parametrize("file", [*WORKFLOWS.glob("*.json"), *API.glob("*.json")], ids=lambda path: path.stem)
def test_nothing_of_the_machine_is_inside(file) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(^|[\"\s])(/|[A-Za-z]:\\)\w|localhost|127\.0\.0\.1|https?://", text)


@pytest.mark.parametrize("name", ["demo_train", "rollout_preview"])
def test_comfyui_accepts_the_demo_prompts(mappings, name) -> None:
    import execution

    prompt = read(API, name)
    valid, error, outputs, node_errors = asyncio.run(execution.validate_prompt("test", prompt, None))
    assert valid, error
    assert not node_errors
    assert set(outputs) == {
        key for key, n in prompt.items() if getattr(mappings[n["class_type"]], "OUTPUT_NODE", False)
    }
