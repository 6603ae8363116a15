"""Measurements of training steps: ``python -m benchmarks.NAME``; the last line printed is ``RESULT {json}``."""
