"""Interoperability: Hugging Face Transformers, a page for browsers, and weights to fine-tune.

`transformers` writes a model as a directory for Hugging Face's Transformers, and reads one;
`pretrained` reads the weights that a run is fine-tuned from (`read_init_weights`), and loads them into its model;
`page` writes models as one HTML page, whose code is in `browser/`. They take the state of a model and the fields of
its `GPTConfig`, both as dictionaries, and import neither class.
"""
