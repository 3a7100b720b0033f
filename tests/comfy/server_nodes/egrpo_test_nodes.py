"""Nodes for the server tests: they order execution, look at a MODEL, and make training fail on purpose.

A custom-node file of its own, linked into the test server beside the pack.
"""

from __future__ import annotations

import hashlib
import json

import comfy.model_management
import comfy.patcher_extension
import torch
from comfy_api.latest import ComfyExtension, io

CATEGORY = "E-GRPO tests"
Reward = io.Custom("EGRPO_REWARD")
Lora = io.Custom("LORA_MODEL")


def digest(tensors) -> str:
    """SHA-256 over the bytes of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class After(io.ComfyNode):
    """Hands a MODEL on once ``after`` is known; another ``note`` makes ComfyUI compute what follows again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.String.Input("note"), io.AnyType.Input("after", optional=True)]
        return io.Schema("EGRPOTestAfter", category=CATEGORY, inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model, note, after=None) -> io.NodeOutput:
        return io.NodeOutput(model)


class LatentHash(io.ComfyNode):
    """SHA-256 of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "EGRPOTestLatentHash",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent")],
            outputs=[io.String.Output()],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        value = digest([latent["samples"]])
        return io.NodeOutput(value, ui={"text": [value]})


class ModelFacts(io.ComfyNode):
    """JSON of what training must not leave on a MODEL, and of what it must not change."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "EGRPOTestModelFacts",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), io.String.Input("note"), io.AnyType.Input("after", optional=True)],
            outputs=[io.String.Output()],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, note, after=None) -> io.NodeOutput:
        modules = list(model.model.modules())
        facts = {
            "object": id(model),
            "weights": digest(parameter for _, parameter in sorted(model.model.named_parameters())),
            "wrapped forwards": sum("forward" in module.__dict__ for module in modules),
            "hooks": sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules),
            "parameters with gradient": sum(parameter.grad is not None for parameter in model.model.parameters()),
            "injections": sorted(model.injections),
            "patches": len(model.patches),
            "transformer options": sorted(model.model_options.get("transformer_options", {})),
            "in training": bool(comfy.model_management.in_training),
            "attached elsewhere": sum(
                "egrpo" in loaded.model.injections
                for loaded in comfy.model_management.current_loaded_models
                if loaded.model
            ),
        }
        text = json.dumps(facts)
        return io.NodeOutput(text, ui={"text": [text]})


class _FaultyReward:
    """Scores by a given reward, until the ``at``-th batch of ``images`` images: then it fails as ``fault`` says."""

    def __init__(self, reward, fault: str, at: int, images: int) -> None:
        self._reward, self._fault, self._at, self._images = reward, fault, at, images
        self._batches = 0
        self.name = "faulty"

    def score(self, images, prompts):
        scores = self._reward.score(images, prompts)
        self._batches += len(images) == self._images
        if self._batches == self._at:
            if self._fault == "raise":
                raise RuntimeError("failed on purpose")
            scores = scores.clone()
            scores[-1] = float("nan")
        return scores

    def settings(self) -> dict:
        return {"name": self.name}


class FaultyReward(io.ComfyNode):
    """A reward that fails in the middle of training."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "EGRPOTestFaultyReward",
            category=CATEGORY,
            inputs=[
                Reward.Input("reward"),
                io.Combo.Input("fault", options=["raise", "nan"]),
                io.Int.Input("at", min=1),
                io.Int.Input("images", min=1),
            ],
            outputs=[Reward.Output()],
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, reward, fault, at, images) -> io.NodeOutput:
        (term,) = reward.terms
        return io.NodeOutput(type(reward)((type(term)(_FaultyReward(term.reward, fault, at, images)),)))


class OutOfMemory(io.ComfyNode):
    """A clone of a MODEL that runs out of memory in an update, in its ``at``-th forward or backward pass."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "EGRPOTestOutOfMemory",
            category=CATEGORY,
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("where", options=["forward", "backward"]),
                io.Int.Input("at", min=1),
            ],
            outputs=[io.Model.Output()],
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model, where, at) -> io.NodeOutput:
        calls = 0

        def fail(*_):
            raise torch.OutOfMemoryError("out of memory on purpose")

        def wrapper(executor, *args, **kwargs):
            nonlocal calls
            if not torch.is_grad_enabled():
                return executor(*args, **kwargs)
            calls += 1
            if calls == at and where == "forward":
                fail()
            output = executor(*args, **kwargs)
            if calls == at:
                output.register_hook(fail)
            return output

        model = model.clone()
        model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "egrpo_test", wrapper)
        return io.NodeOutput(model)


class ServerTestExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [After, LatentHash, ModelFacts, FaultyReward, OutOfMemory]


async def comfy_entrypoint() -> ServerTestExtension:
    return ServerTestExtension()
