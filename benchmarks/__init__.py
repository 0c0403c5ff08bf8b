"""Benchmarks: ratios measured in one run. See docs/benchmarks.md."""
