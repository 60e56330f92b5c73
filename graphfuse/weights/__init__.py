"""Streaming safetensors into this rank's part of a model."""
