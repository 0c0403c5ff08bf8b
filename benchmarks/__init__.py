"""What the code costs: ratios measured in one run. See docs/benchmarks.md."""
