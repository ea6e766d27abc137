"""Text: where it is read from, and how it becomes ids.

`sources` opens and downloads texts: files, patterns, URLs, compressed or not. `encoding` turns a text into a
vocabulary and a tensor of ids, in memory or, for a large one, mapped from a cache file.
The package knows paths, digests and limits; it does not know configurations, windows or processes.
"""
