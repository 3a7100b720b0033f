"""Socket types of the pack, and what each carries."""

from comfy_api.latest import io

Plan = io.Custom("EGRPO_PLAN")
""":class:`egrpo.schedule.Plan`."""

Prompts = io.Custom("EGRPO_PROMPTS")
""":class:`egrpo.prompts.PromptSet`."""

Reward = io.Custom("EGRPO_REWARD")
""":class:`egrpo.rewards.RewardSet`."""

Run = io.Custom("EGRPO_RUN")
""":class:`egrpo.run.Run`, a run on disk."""
