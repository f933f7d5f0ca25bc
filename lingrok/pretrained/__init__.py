"""Weights trained elsewhere: readers of foreign files, and the config and parameters of a lingrok model for them."""
