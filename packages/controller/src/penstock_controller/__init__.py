"""The self-hosted platform: a service with a queue of evaluation and training runs, and the commands that use it."""
