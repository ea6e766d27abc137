"""Interoperability: Hugging Face Transformers, a page for browsers, weights to fine-tune."""
