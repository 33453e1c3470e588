"""Slow textbook versions of the algorithms in float64: plain loops, written from the papers, not from our code."""
