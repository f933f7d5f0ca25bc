"""Pretrained language models at work: prompts, a forward pass that shares prefixes, generation."""
