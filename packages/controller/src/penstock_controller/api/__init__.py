"""The controller over HTTP: the platform's routes under `/api/cli/`, and our additions to them; one file for each station."""
