"""Parsing F1 by convention, EVALB, tables of errors, baseline trees."""
