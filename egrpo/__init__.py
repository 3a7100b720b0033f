"""E-GRPO (arXiv 2601.00423): entropy-guided group-relative policy optimisation for rectified-flow models."""

__version__ = "0.1.0"
