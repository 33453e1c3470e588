"""Evaluation of the exact packed file: loading, protocol, perplexity, fidelity, uncertainty, reports."""
