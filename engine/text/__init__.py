"""Text: from its sources to ids.

Three steps: sources.py finds, opens and unpacks files (`find_files`); documents.py decodes them to characters, a
document each file or row (`Documents`); encoding.py orders and separates documents and replaces characters by ids
(`open_text`, `prepare_text`), in memory or in a cache file.
"""
