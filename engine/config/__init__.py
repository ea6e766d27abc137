"""Settings: clear errors for keys and values, `auto` settings resolved, what may change between starts.

overrides.py checks what is typed for main.py and explains Hydra's errors; arguments.py does the same for
the small programs, and prints fields for --help; settings.py knows which settings a resumed run may
change; auto.py resolves the `auto` fields of a `TrainerConfig`. The package imports none of the dataclasses
that the settings belong to.
"""
