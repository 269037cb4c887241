"""Measuring what the models learned."""
