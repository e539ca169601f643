"""A user's project on disk: its layout, its experiment files, its scaffold, and what is checked before a run of it is begun."""
