"""A run spread over the processes and machines of a Ray cluster: the only place that imports Ray."""
