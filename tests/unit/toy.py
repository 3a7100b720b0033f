"""A policy small enough to check by hand: an affine velocity on 2x4x4 latents, with a low-rank correction to learn."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from egrpo.policy import Policy
from egrpo.prompts import PromptSet
from egrpo.rewards import Reward, RewardSet, RewardTerm

SHAPE = (2, 4, 4)
PROMPTS = PromptSet(("red", "green", "blue"), ("grey", "black"))


class ToyPolicy(Policy):
    """v = x - target(prompt) + correction; counts every latent it evaluates."""

    def __init__(self, seed: int = 0) -> None:
        self.latent_shape, self.device = SHAPE, torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        size = SHAPE[0] * SHAPE[1] * SHAPE[2]
        self.down = nn.Parameter(torch.randn(4, size, generator=generator) / size**0.5)
        self.up = nn.Parameter(torch.zeros(size, 4))
        self.bias = nn.Parameter(torch.zeros(size))
        self.evaluated = self.with_gradient = 0
        self.interrupt_after: int | None = None
        self.adapted = True

    def encode(self, prompts):
        return [0.1 * len(prompt) for prompt in prompts]

    def _velocity(self, condition):
        def velocity(x: Tensor, sigma: float) -> Tensor:
            self.evaluated += len(x)
            flat = x.flatten(1)
            v = flat - condition
            if self.adapted:
                v = v + flat @ self.down.T @ self.up.T + self.bias
            return v.view_as(x)

        return velocity

    def rollout(self, condition, work, *, base=False):
        with torch.no_grad(), self._adapted(not base):
            return work(self._velocity(condition))

    def update(self, condition, work):
        velocity = self._velocity(condition)

        def counted(x, sigma):
            self.with_gradient += len(x)
            return velocity(x, sigma)

        def base_velocity(x, sigma):
            with torch.no_grad(), self._adapted(False):
                return velocity(x, sigma)

        return work(counted, base_velocity)

    @contextmanager
    def _adapted(self, adapted):
        self.adapted, before = adapted, self.adapted
        try:
            yield
        finally:
            self.adapted = before

    def decode(self, latents):
        return latents[:, :1].movedim(1, -1).expand(-1, -1, -1, 3).float()

    def parameters(self):
        return [self.down, self.up, self.bias]

    def state_dict(self):
        return {name: getattr(self, name).detach().clone() for name in ("down", "up", "bias")}

    def load_state_dict(self, state):
        with torch.no_grad():
            for name, value in state.items():
                getattr(self, name).copy_(value)

    def export_lora(self):
        return {"transformer.toy.lora_A.weight": self.down.detach().clone()}

    def check_interrupted(self):
        if self.interrupt_after is not None and self.evaluated >= self.interrupt_after:
            raise KeyboardInterrupt


class Brightness(Reward):
    """Mean value of the image."""

    name = "brightness"

    def score(self, images, prompts):
        return images.mean(dim=(1, 2, 3))


class Darkness(Brightness):
    name = "darkness"

    def score(self, images, prompts):
        return -super().score(images, prompts)


BRIGHTNESS = RewardSet((RewardTerm(Brightness()),))
