"""Lean tensor-parallel model definitions: one file per family, shared layers, the checkpoint name maps."""
