"""Settings: what they are, clear errors for keys and values, what may change between starts.

schema.py declares them, one dataclass a group, with what a resumed run may change. overrides.py checks what is typed
for main.py and explains Hydra's errors; arguments.py does the same for the small programs, and prints fields for
--help.
"""
