"""One module for each agent framework; importing it loads the framework."""
