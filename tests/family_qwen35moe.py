"""Qwen3.5-MoE in `transformers`: see family_qwen35."""

from tests.family_qwen35 import build, parameter

__all__ = ["build", "parameter"]
