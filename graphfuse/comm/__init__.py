"""The run-time side of fused reductions: comm backends, their workspaces, and the choice between them by size.

decision (graphfuse.gate) ──► pool.prepare: vote, workspaces, active ranges
fused op ──► dispatch.run ──► flashinfer | reference
"""
