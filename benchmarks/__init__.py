"""Measurements, the scripts that make and judge them, and recorded figures of peers."""
