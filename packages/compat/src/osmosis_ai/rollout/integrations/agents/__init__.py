"""One module per agent framework. Importing a module imports its framework."""
