"""Data, objectives and evaluation of the programs."""
