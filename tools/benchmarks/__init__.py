"""Benchmarks for developers, each beside the limit of what it measures. See docs/benchmarks.md."""
