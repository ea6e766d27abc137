"""Snapshots: everything a run needs to resume, written atomically and verified when read.

`SnapshotManager` (manager.py) saves and restores a run, all ranks together; `Snapshot` (snapshot.py) is
what one file holds; `SnapshotStorage` (storage.py) keeps the files of a run on a disk or in an object
store; sharded.py lets every rank write its own part. Knows nothing of the loop or of the kind of model.
"""
