"""A service that keeps a queue of evaluation and training runs and carries them out, each in a process of its own."""
