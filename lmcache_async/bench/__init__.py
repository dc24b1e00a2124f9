"""Benchmarks, each beside the limit of what it measures. One file a benchmark, found in table.py."""
