"""Snapshots: everything a run needs to resume, written atomically and verified when read."""
