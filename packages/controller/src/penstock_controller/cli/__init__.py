"""The controller's commands, added to the `penstock` command line by an entry point of the group `penstock.command`."""
