"""Benchmarks for developers, each compared with a limit of its operation. See docs/benchmarks.md."""
