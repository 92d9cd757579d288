"""Gives `DiffusionPipeline.from_pretrained(model, custom_pipeline=<this folder>, trust_remote_code=True)` our pipeline.

Diffusers copies this file elsewhere before it imports it and wants exactly one pipeline class in it, so it holds one
name and no relative import.
"""

from diffusers_continuous import ContinuousBatchingPipeline

__all__ = ["ContinuousBatchingPipeline"]
