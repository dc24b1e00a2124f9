"""Probes of a machine: memory, disk and one tier, each beside its physical limit. See docs/benchmarks.md."""
