"""Measuring this host: the fused all-reduce beside its alternatives, and the size table that follows from it.

inputs ─► candidates ─► timing (interleaved CUDA-graph replays) ─► rows ─► report, plot, size table
"""
