"""Observe a run: metrics, traces, communication."""
