"""What ComfyUI and its users see of the nodes: names, tooltips, help, and a load that costs next to nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from tests.comfy.pack import ROOT

NODE_IDS = {
    "EGRPODemoModels",
    "EGRPODemoReward",
    "EGRPOEvaluate",
    "EGRPOMergedStepSampler",
    "EGRPOPlan",
    "EGRPOPrompts",
    "EGRPOReward",
    "EGRPORolloutPreview",
    "EGRPOTrainLora",
}
OUTPUT_NODES = NODE_IDS - {"EGRPODemoModels", "EGRPODemoReward", "EGRPOMergedStepSampler", "EGRPOReward"}
LOAD = """
import asyncio, json, sys
from pathlib import Path
root, comfy = sys.argv[1:]
sys.path.append(root)
from tests.comfy.pack import pack_module, use_comfyui
use_comfyui(Path(comfy))
import nodes
before = set(sys.modules)
async def load():
    extension = await pack_module().comfy_entrypoint()
    await extension.on_load()
    for node in await extension.get_node_list():
        node.GET_SCHEMA()
asyncio.run(load())
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def node_classes(pack) -> list:
    async def load() -> list:
        return await (await pack.comfy_entrypoint()).get_node_list()

    return asyncio.run(load())


@pytest.fixture(scope="module")
def schemas(node_classes) -> list:
    return [node.GET_SCHEMA() for node in node_classes]


def test_the_nodes_are_these(schemas) -> None:
    assert {schema.node_id for schema in schemas} >= NODE_IDS
    assert len({schema.node_id for schema in schemas}) == len(schemas)
    assert NODE_IDS & {schema.node_id for schema in schemas if schema.is_output_node} == OUTPUT_NODES


def test_names_and_categories(schemas) -> None:
    for schema in schemas:
        assert schema.node_id.startswith("EGRPO")
        assert schema.display_name.startswith("E-GRPO ")
        assert schema.category.startswith("E-GRPO/")
        assert schema.description.endswith(".")
        assert schema.search_aliases


def test_every_input_and_output_has_a_tooltip(schemas) -> None:
    silent = [
        f"{schema.node_id}.{item.id}"
        for schema in schemas
        for item in (*schema.inputs, *schema.outputs)
        if not (item.tooltip or "").strip()
    ]
    assert not silent


def test_execute_takes_what_the_schema_offers(node_classes) -> None:
    """An input without a parameter would only fail when the node runs."""
    import inspect

    for node in node_classes:
        schema = node.GET_SCHEMA()
        parameters = inspect.signature(node.execute).parameters.values()
        named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        offered = {item.id for item in schema.inputs}
        assert named <= offered, schema.node_id
        assert named == offered or any(p.kind is p.VAR_KEYWORD for p in parameters), schema.node_id


def test_defaults_lie_within_their_limits(schemas) -> None:
    for schema in schemas:
        for item in schema.inputs:
            default = getattr(item, "default", None)
            if default is None:
                continue
            where = f"{schema.node_id}.{item.id}"
            assert getattr(item, "min", None) is None or item.min <= default <= item.max, where
            assert getattr(item, "options", None) is None or default in item.options, where


def test_every_node_has_a_help_page(schemas) -> None:
    for schema in schemas:
        page = ROOT / "web" / "docs" / f"{schema.node_id}.md"
        assert page.is_file(), page.name
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {schema.display_name}\n")


def test_help_pages_name_only_inputs_that_exist(schemas) -> None:
    """Inputs are written as list items that start with the name in bold code: - **`name`**."""
    import re

    for schema in schemas:
        text = (ROOT / "web" / "docs" / f"{schema.node_id}.md").read_text(encoding="utf-8")
        named = set(re.findall(r"\*\*`(\w+)`\*\*", text))
        assert named <= {item.id for item in (*schema.inputs, *schema.outputs)}, schema.node_id


def test_loading_imports_nothing_heavy(comfy_path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(ROOT), str(comfy_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}
    assert "egrpo_pack" in loaded
    assert not loaded & {"accelerate", "diffusers", "matplotlib", "open_clip", "peft", "transformers"}


def test_a_server_offers_the_nodes(server) -> None:
    offered = server.object_info()
    assert NODE_IDS <= set(offered)
    assert offered["EGRPOPlan"]["output"] == ["EGRPO_PLAN", "SIGMAS", "IMAGE", "STRING"]
    assert {"EGRPO_PLAN", "EGRPO_PROMPTS", "EGRPO_REWARD"} <= {
        spec[0] for spec in offered["EGRPOTrainLora"]["input"]["required"].values() if isinstance(spec[0], str)
    }
