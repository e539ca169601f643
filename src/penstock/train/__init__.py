"""The trainer: from complete groups to the next policy version."""
