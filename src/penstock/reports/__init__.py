"""Reports: a run or an evaluation as one HTML page."""
