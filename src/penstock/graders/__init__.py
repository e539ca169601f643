"""Ready-made graders, one file each."""
