"""Built-in graders, one file each."""
