"""Masked and masked-diffusion language models."""
