"""Text: sources.py finds and opens files, documents.py decodes them, encoding.py replaces characters by ids."""
