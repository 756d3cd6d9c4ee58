"""Reads result records and shows them: tables, plots, one HTML report. Never runs a model."""
