"""Benchmarks, which compare cases within one run; see docs/benchmarks.md."""
