"""Reward functions and their combination."""

from .base import Reward, RewardError, RewardSet, RewardTerm

__all__ = ["Reward", "RewardError", "RewardSet", "RewardTerm"]
