"""Benchmarks of memory, disk and one tier, compared with their physical limits. See docs/benchmarks.md."""
